"""The files of a folder of pages and states: how one is written, read and checked, and which are there. Plain Python, no torch.

    files = FolderFiles(Path("/nvme/kv"), identity)
    name = FileName("page", page_hash, parent)
    files.write(name, memory)                # returns when the file is complete; OSError
    files.read(name, memory)                 # OSError, or BadFileError for a file that is not what was written
    files.scan()                             # (added, removed) since the last scan

A file holds one page or state of all layers, as it lies in the host's memory, after a header with its hash, its identity and a
checksum. The identity says what computed it: the model's weights, the dtype, the layout of a page and so on. Each
identity has a folder for its files, and a file of another identity is never read, even if it was moved there by hand.

Several processes may use the folder, and each may end at any moment. A file is written under another name and renamed when it
is complete, so nobody sees a part of it. Files of pages are written without fsync: the checksum finds those that a loss of
power has torn. The secret is written with fsync, because all other files are useless without it.
Left out: which files are worth keeping (folder_index.py), and when they are read and written (folder_tier.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from struct import Struct
from typing import NamedTuple

HEADER = Struct("<8s16s16s16s8sQI")
"""MAGIC, identity, hash, hash of the page before, kind, bytes that follow, and the CRC-32 of all these and of what follows."""
MAGIC = b"fa_kv\x00\x00\x01"
STALE_SECONDS = 600.0
"""Age of a file with a temporary name after which the process that wrote it is assumed to be gone."""
SECRET_BYTES = 16
NO_PARENT = bytes(16)

_IDENTITY = re.compile(r"[0-9a-f]{32}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.(page|state)")
_TEMPORARY = re.compile(r"\.[0-9a-f]+-[0-9]+\.tmp")


class BadFileError(Exception):
    """A file is not what was written under its name: it is torn, truncated or altered, or it is another file."""


class FileName(NamedTuple):
    """kind: "page" or "state"; parent: hash of the page before, empty for a first page

    A file of another identity has its path in the folder as its kind, and no hashes.
    """

    kind: str
    page_hash: bytes
    parent: bytes = b""


class FoundFile(NamedTuple):
    """A file that a scan has found. used: when it was read or written last, in nanoseconds of the file system's clock"""

    name: FileName
    num_bytes: int
    used: int


class FolderFiles:
    """The files of one identity in a folder, and the paths of the files of other identities.

    folder:   is created if it does not exist, readable only by its owner
    identity: 16 bytes
    about:    what the identity stands for, written to a file for people to read

    Raises OSError if the folder cannot be used. `scan` belongs to one thread; the other methods may be called from any.
    """

    def __init__(self, folder: Path, identity: bytes, about: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self._identity = identity
        self._own = folder / identity.hex()
        self._tag = os.urandom(8).hex()  # process ids are not unique: containers may have the same ones
        self._serial = count()
        self._known: dict[FileName, int] = {}
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.secret = self._read_or_make("secret", os.urandom(SECRET_BYTES), SECRET_BYTES)
        self._read_or_make("about.json", json.dumps(about or {}, indent=1, default=str).encode())

    def path_of(self, name: FileName) -> Path:
        if not name.page_hash:
            return self.folder / name.kind
        text = name.page_hash.hex()
        return self._own / text[:2] / f"{text}.{(name.parent or NO_PARENT).hex()}.{name.kind}"

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Bytes of a file for a row of `num_bytes` bytes."""
        return HEADER.size + num_bytes

    def write(self, name: FileName, data: memoryview) -> None:
        """Write a file, which replaces an older one. Raises OSError, and leaves no part of a file then."""
        path = self.path_of(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with self._temporary(path.parent) as temporary:
            with open(temporary, "wb", buffering=0) as file:
                _write_all(file.fileno(), self._header(name, data))
                _write_all(file.fileno(), data)
            os.replace(temporary, path)

    def read(self, name: FileName, into: memoryview) -> None:
        """Read a file and check it. Raises BadFileError or OSError; the content of `into` is not valid then."""
        path = self.path_of(name)
        with open(path, "rb", buffering=0) as file:
            header = file.read(HEADER.size)
            done = 0
            while done < len(into) and (step := file.readinto(into[done:])):
                done += step
            rest = file.read(1)
        if done < len(into) or rest or header != self._header(name, into):
            raise BadFileError(f"{path} is torn, truncated or altered")
        with suppress(OSError):
            os.utime(path)  # scans of later processes then see it as the most recently used

    def remove(self, name: FileName) -> None:
        """Remove a file, if it is there. Raises OSError."""
        self.path_of(name).unlink(missing_ok=True)

    def scan(self) -> tuple[list[FoundFile], list[FileName]]:
        """The files that have been added to the folder since the last scan, the least recently used one first, and those that
        are gone. Temporary files of processes that are gone are removed. Raises OSError.
        """
        found = {each.name: each for each in self._walk()}
        added = sorted((each for name, each in found.items() if name not in self._known), key=lambda each: each.used)
        removed = [name for name in self._known if name not in found]
        self._known = {name: each.num_bytes for name, each in found.items()}
        return added, removed

    def _header(self, name: FileName, data: memoryview) -> bytes:
        fields = (MAGIC, self._identity, name.page_hash, name.parent or NO_PARENT, name.kind.encode(), len(data))
        checksum = zlib.crc32(data, zlib.crc32(HEADER.pack(*fields, 0)))
        return HEADER.pack(*fields, checksum)

    def _read_or_make(self, name: str, content: bytes, size: int = 0) -> bytes:
        """The content of a small file. One of the processes makes it, and all see it complete, even after a loss of power.

        size: bytes of a valid file, if that is known; a file of another size is replaced
        """
        path = self._own / name
        with _locked(self._own) as folder:
            if size and path.exists() and path.stat().st_size != size:
                path.unlink()
            if not path.exists():
                with self._temporary(self._own) as temporary:
                    with open(temporary, "wb") as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    with suppress(FileExistsError):  # another process may be faster if the file system has no locks
                        os.link(temporary, path)
                with suppress(OSError):  # some file systems cannot do this for a folder
                    os.fsync(folder)
        return path.read_bytes()

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[Path]:
        """An empty file in a folder, to be written and then moved or linked to its name. Its temporary name is removed."""
        path = folder / f".{self._tag}-{next(self._serial)}.tmp"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            yield path
        finally:
            with suppress(OSError):
                path.unlink()

    def _walk(self) -> Iterator[FoundFile]:
        now = time.time()
        for identity in _folders(self.folder, _IDENTITY):
            _remove_stale(identity, now)
            is_own = identity.name == self._own.name
            for shard in _folders(identity, _SHARD):
                with os.scandir(shard) as entries:
                    for entry in entries:
                        if match := _FILE.fullmatch(entry.name):
                            path = f"{identity.name}/{shard.name}/{entry.name}"
                            yield from _found(entry, _name_of(*match.groups()) if is_own else FileName(path, b""))
                _remove_stale(shard, now)


def _name_of(page_hash: str, parent: str, kind: str) -> FileName:
    before = bytes.fromhex(parent)
    return FileName(kind, bytes.fromhex(page_hash), b"" if before == NO_PARENT else before)


def _found(entry: os.DirEntry[str], name: FileName) -> Iterator[FoundFile]:
    """The file of an entry; none if another process has removed it, or if the entry is no regular file."""
    with suppress(FileNotFoundError):
        if entry.is_file(follow_symlinks=False):
            facts = entry.stat(follow_symlinks=False)
            yield FoundFile(name, facts.st_size, facts.st_mtime_ns)


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The folders in a folder that have such a name. Links are not followed."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(each.path) for each in entries if pattern.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
        )


def _remove_stale(folder: Path, now: float) -> None:
    """Remove the incomplete files of processes that were killed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if _TEMPORARY.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < now - STALE_SECONDS:
                    os.unlink(entry.path)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """An open folder, locked against other processes if its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
