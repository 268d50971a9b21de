"""Ranks that torchrun starts, on one machine or on several: who this process is, and how the others find rank 0.

    torchrun --nnodes 2 --nproc-per-node 1 ... -m fa_serve serve MODEL --tensor-parallel 2      # on each machine

    torchrun = Torchrun.find(config)             # None: only rank 0 runs so far, and it starts the others
    torchrun.accept(links)                       # rank 0
    connection = torchrun.connect()              # the others

Rank 0 listens on MASTER_ADDR. Messages are pickled, and unpickling runs code. So both sides of a connection first prove that
they know the secret FA_SERVE_RANK_KEY (multiprocessing's challenge by HMAC), and until then nothing is unpickled. What follows
is neither encrypted nor authenticated. A machine that vanishes is noticed by the kernel's probes (PROBE_SECONDS). Left out:
what the ranks say (leader.py, follower.py), who asks for this (follower_main.py), and how processes without torchrun are
started (links.py).
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.errors import EngineDeadError
from fa_serve.engine.parallel.links import Link
from fa_serve.ops.collectives.all_reduce import join
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

KEY = "FA_SERVE_RANK_KEY"
MIN_KEY = 16
"""The fewest characters of the secret. Anybody who can read the challenge on the wire can try all short secrets."""
START_SECONDS = 600.0
"""How long the ranks may take to find each other."""
HANDSHAKE_SECONDS = 5
"""How long a process that connects may be silent before it has proved that it knows the secret."""
PROBE_SECONDS = 5
"""Time between two probes of a silent machine. It counts as lost after PROBES probes without an answer."""
PROBES = 3
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STRANGER = (AuthenticationError, OSError, EOFError, AssertionError, ValueError)
"""What the challenge raises for a process that does not know the secret, or that speaks another protocol."""


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What the environment says about this process.

    local_rank, local_size: the number of this rank among the ranks of this machine, and how many these are
    host, port: MASTER_ADDR and MASTER_PORT
    has_store:  whether torchrun listens on the port with a store; otherwise rank 0 listens there
    attempt:    how often torchrun has restarted all ranks
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_store: bool
    attempt: str

    @classmethod
    def find(cls, config: EngineConfig) -> Torchrun | None:
        """None if torchrun has not started this process, or only this one, or if the model is not divided.

        Raises ParameterError for settings that cannot work under torchrun.
        """
        told = os.environ
        if config.tensor_parallel == 1 or any(name not in told for name in _VARIABLES) or told["WORLD_SIZE"] == "1":
            return None
        found = cls(
            rank=int(told["RANK"]),
            size=int(told["WORLD_SIZE"]),
            local_rank=int(told["LOCAL_RANK"]),
            local_size=int(told.get("LOCAL_WORLD_SIZE", 1)),
            host=told["MASTER_ADDR"],
            port=int(told["MASTER_PORT"]),
            has_store=told.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=told.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        if found.size != config.tensor_parallel:
            rule = f"be {found.size}, the number of processes that torchrun has started (WORLD_SIZE)"
            raise ParameterError("tensor_parallel", rule, config.tensor_parallel)
        if config.max_restarts:
            rule = "be 0 under torchrun, which cannot restart individual ranks"
            raise ParameterError("max_restarts", rule, config.max_restarts)
        _secret()
        return found

    def accept(self, links: list[Link]) -> None:
        """Wait until all followers have connected, and put a link to each into `links`, in the order of ranks. For rank 0.

        A process that does not know the secret is refused. Raises EngineDeadError if a rank does not connect in time.
        """
        secret = _secret()
        limit = time.monotonic() + START_SECONDS
        missing = set(range(1, self.size))
        with self._listener() as listener:
            if self.has_store:
                join(self.port, self.size, self.host).set(self._name, str(listener.getsockname()[1]))
            while missing:
                listener.settimeout(max(limit - time.monotonic(), 0.001))
                try:
                    raw, peer = listener.accept()
                except TimeoutError:
                    which = ", ".join(str(rank) for rank in sorted(missing))
                    raise EngineDeadError(f"rank {which} of {self.size} has not connected within {START_SECONDS:g} s") from None
                connection = _connection(raw)
                try:
                    deliver_challenge(connection, secret)
                    answer_challenge(connection, secret)
                    rank = int(connection.recv_bytes(8))
                    missing.remove(rank)
                except (*_STRANGER, KeyError) as error:
                    log.warning("a connection from %s is refused: %s: %s", peer[0], type(error).__name__, error)
                    connection.close()
                    continue
                _set_silence(connection, 0)
                links.append(Link(rank, connection, host=str(peer[0])))
        links.sort(key=lambda link: link.rank)

    def connect(self) -> Connection:
        """Wait until rank 0 listens, and connect to it. For the other ranks. Raises EngineDeadError."""
        secret = _secret()
        where = f"rank 0 at {self.host}"
        limit = time.monotonic() + START_SECONDS
        port = self.port
        if self.has_store:
            port = int(join(self.port, self.size, self.host, timedelta(seconds=START_SECONDS)).get(self._name))
        while True:
            try:
                raw = socket.create_connection((self.host, port), timeout=HANDSHAKE_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > limit:
                    raise EngineDeadError(f"rank {self.rank} of {self.size} cannot connect to {where}: {error}") from error
                time.sleep(0.1)
        raw.settimeout(None)
        connection = _connection(raw)
        try:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            connection.send_bytes(str(self.rank).encode())
        except _STRANGER as error:
            connection.close()
            raise EngineDeadError(f"rank {self.rank} of {self.size} and {where} have different secrets ({KEY})") from error
        _set_silence(connection, 0)
        return connection

    @property
    def _name(self) -> str:
        """The key of rank 0's port in torchrun's store."""
        return f"fa_serve/{self.attempt}/port"

    def _listener(self) -> socket.socket:
        """A socket that listens on MASTER_ADDR and on no other address of this machine. Raises ParameterError."""
        try:
            port = 0 if self.has_store else self.port
            family, _, _, _, address = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address, family=family)
        except OSError as error:
            raise ParameterError("MASTER_ADDR", f"be an address of rank 0's machine ({error})", self.host) from error


def _secret() -> bytes:
    secret = os.environ.get(KEY, "")
    if len(secret) < MIN_KEY:
        rule = f"have at least {MIN_KEY} characters under torchrun, and be the same secret for all ranks"
        raise ParameterError(KEY, rule, len(secret))
    return secret.encode()


def _connection(raw: socket.socket) -> Connection:
    """The socket as a connection of multiprocessing. A read fails if the other end is silent for HANDSHAKE_SECONDS."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": PROBE_SECONDS,
        "TCP_KEEPINTVL": PROBE_SECONDS,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": 1000 * PROBE_SECONDS * (PROBES + 1),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(raw.detach())
    _set_silence(connection, HANDSHAKE_SECONDS)
    return connection


def _set_silence(connection: Connection, seconds: int) -> None:
    """Set how long a read waits; 0 waits for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
