"""A trainer gives weights to servers, which are processes of their kind: through HTTP and a process group of gloo."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from server_process import ServerProcess
from tiny_models import greedy, make_model
from torch import nn

from fa_serve.engine import WeightSender, WeightTransferError
from fa_serve.engine.rollout import weight_sender
from fa_serve.engine.rollout.weight_group import WeightGroup
from fa_serve.ops.collectives.all_reduce import LOOPBACK
from fa_serve.spec import ParameterError

KEY = "operator"
PROMPT = [*range(5, 25)]
SIZES = ("--dtype", "float32", "--max-model-len", "64", "--page-size", "4")


@pytest.fixture(scope="module", params=["thread", "process"])
def server(
    request: pytest.FixtureRequest, start_server: Callable[..., ServerProcess], model_folder: Path
) -> Iterator[ServerProcess]:
    flags = ("--process",) if request.param == "process" else ("--no-process",)
    served = start_server(str(model_folder), "--served-model-name", "tiny", *SIZES, *flags, FA_SERVE_ADMIN_KEY=KEY)
    yield served
    served.end()


in_a_thread = pytest.mark.parametrize("server", ["thread"], indirect=True)
"""Marks a test of the trainer's side, or of the server in front of its engine."""


def make_trained(seed: int) -> Any:
    """The model after a step."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
    return model


def answer_of(url: str, timeout: float = 30.0) -> tuple[list[int], int]:
    """The greedy answer to the prompt, and the version of the weights when it began."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], int(response.headers["x-weight-version"])


def version_of(url: str) -> int:
    return int(httpx.get(f"{url}/health").headers["x-weight-version"])


@pytest.mark.slow
def test_a_server_answers_with_the_trainers_weights(server: ServerProcess) -> None:
    sender = WeightSender(server.url, KEY)
    sender.init_weight_transfer()
    for seed in (1, 2):
        model = make_trained(seed)
        before = version_of(server.url)
        sender.pause()
        assert sender.send_weights(model.named_parameters()) == before + 1
        sender.resume()
        assert answer_of(server.url) == (greedy(model, PROMPT, 12), before + 1)
    sender.destroy()
    with pytest.raises(WeightTransferError, match="call init_weight_transfer first"):
        sender.send_weights(model.named_parameters())


def test_an_update_is_waited_for_by_its_size(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one that took more than five minutes failed, however large the model was."""
    waited: list[float] = []

    class Connection(weight_sender.HTTPConnection):
        def __init__(self, host: str, timeout: float) -> None:
            waited.append(timeout)
            super().__init__(host, timeout=timeout)

    monkeypatch.setattr(weight_sender, "HTTPConnection", Connection)
    sender = WeightSender(server.url, KEY)
    sender.init_weight_transfer()
    model = make_trained(3)
    sender.send_weights(model.named_parameters())
    sender.destroy()
    size = sum(x.nbytes for x in model.parameters())
    assert waited == [300.0, 300.0, 300.0 + size / 10e6]


def test_what_the_model_does_not_have_is_refused_before_it_is_sent(server: ServerProcess) -> None:
    """The server keeps its weights, and the group is as good as before."""
    sender = WeightSender(server.url, KEY)
    sender.init_weight_transfer()
    assert sender._group is not None
    before = answer_of(server.url)
    good = ("model.norm.weight", torch.zeros(32))
    sent: list[torch.Tensor] = []
    send = sender._group.broadcast
    sender._group.broadcast = sent.append  # type: ignore[method-assign]
    for wrong, told in (
        (("model.norm.weight", torch.zeros(33)), r"must have the shape \(32,\) for model.norm.weight"),
        (("model.norm.weight", torch.zeros(32, dtype=torch.bfloat16)), "must have the dtype float32 for model.norm.weight"),
        (("model.norm.weight", torch.zeros(32, dtype=torch.int64)), "dtype_names"),
        (("norm.weight", torch.zeros(32)), "must have the names of parameters"),
    ):
        with pytest.raises(WeightTransferError, match=f"has answered 400: .*{told}"):
            sender.send_weights([good, wrong])
    with pytest.raises(WeightTransferError, match="has answered 400"):
        sender.send_weights([])
    assert sent == []
    assert answer_of(server.url) == before
    sender._group.broadcast = send  # type: ignore[method-assign]
    model = make_trained(3).to(torch.bfloat16)
    sender._dtype = torch.float32  # as a trainer does whose weights are of another one
    assert sender.send_weights(model.named_parameters()) == before[1] + 1
    assert answer_of(server.url)[0] == greedy(model.to(torch.float32), PROMPT, 12)
    sender.destroy()


@in_a_thread
def test_nobody_can_come_to_the_store_after_all_have_met(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []

    def listening(size: int, host: str, port: int) -> Any:
        store, chosen = listen(size, host, port)
        ports.append(chosen)
        socket.create_connection((host, chosen), 5).close()
        return store, chosen

    listen = weight_sender.listen
    monkeypatch.setattr(weight_sender, "listen", listening)
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    sender = WeightSender(server.url, KEY, port=port)
    sender.init_weight_transfer()
    assert ports == [port]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, port), 5)
    sender.destroy()


@in_a_thread
def test_only_the_administrator_makes_a_group(server: ServerProcess) -> None:
    since = time.monotonic()
    with pytest.raises(WeightTransferError, match="has answered 403"):
        WeightSender(server.url, "stranger").init_weight_transfer()
    assert time.monotonic() - since < 10, "the timeout is longer"


@in_a_thread
def test_a_trainer_without_a_server_is_told(server: ServerProcess) -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    with pytest.raises(WeightTransferError, match="has not answered: ConnectionRefusedError"):
        WeightSender(url, KEY).init_weight_transfer()


@pytest.mark.parametrize("urls", [[], "127.0.0.1:8000", "http://", "http://127.0.0.1:x", "http://[::1", ["http://a", ""]])
def test_urls_that_are_none_are_refused(urls: str | list[str]) -> None:
    with pytest.raises(ParameterError, match=r"urls must be one address or several, such as http://127\.0\.0\.1:8000, got"):
        WeightSender(urls, KEY)


def test_a_place_where_nobody_can_listen_is_told() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        for host, where in ((LOOPBACK, port), ("nobody.invalid", 0), ("a..b", 0)):
            with pytest.raises(WeightTransferError, match=f"cannot listen at {host}, port {where}"):
                WeightSender("http://127.0.0.1:8000", KEY, host=host, port=where).init_weight_transfer()


@pytest.mark.slow
@in_a_thread
def test_the_first_server_that_refuses_is_heard(server: ServerProcess) -> None:
    """Those that wait for it fail later, and know less."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        nobody = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    with pytest.raises(WeightTransferError, match=f"{nobody}/init_weight_transfer_engine has not answered: Connection"):
        WeightSender([server.url, nobody], KEY, timeout=2.0).init_weight_transfer()


@in_a_thread
def test_a_tensor_that_is_divided_between_ranks_is_refused(server: ServerProcess) -> None:
    class Divided(nn.Parameter):
        full_tensor = None

    sender = WeightSender(server.url, KEY)
    sender.init_weight_transfer()
    with pytest.raises(ParameterError, match="weights must be whole"):
        sender.send_weights([("model.norm.weight", Divided(torch.zeros(32)))])
    sender.destroy()


def fail_after(url: str, seed: int, count: int, how: int) -> None:
    """A trainer that gets a signal after so many tensors."""
    sender = WeightSender(url, KEY, timeout=3.0)
    sender.init_weight_transfer()
    group: Any = sender._group
    left = iter(range(count))
    group.broadcast = lambda x: WeightGroup.broadcast(group, x) if next(left, None) is not None else os.kill(os.getpid(), how)
    sender.send_weights(make_trained(seed).named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_trainer_that_fails_in_the_middle_hangs_nobody(
    server: ServerProcess, warm_context: ForkServerContext, how: int
) -> None:
    """No answer is computed with half of the weights, and those who ask wait until all have come."""
    before = version_of(server.url)
    trainer = warm_context.Process(target=fail_after, args=(server.url, 4, 5, how))
    trainer.start()
    since = time.monotonic()
    while not is_paused(server.url):
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert time.monotonic() - since < 60
        time.sleep(0.05)
    if how == signal.SIGKILL:
        trainer.join()
    assert httpx.get(f"{server.url}/health").status_code == 200
    answers: list[tuple[list[int], int]] = []
    waiting = threading.Thread(target=lambda: answers.append(answer_of(server.url, 60)))
    waiting.start()
    model = make_trained(5)
    sender = WeightSender(server.url, KEY)
    sender.init_weight_transfer()  # in the place of the one that has failed
    # as good as before, but not whole
    sender.send_weights([(name, x) for name, x in model.named_parameters() if "layers.0" in name])
    waiting.join(0.5)
    assert (answers, is_paused(server.url)) == ([], True)
    last = sender.send_weights(model.named_parameters())
    waiting.join(30)
    assert answers[0][0] == greedy(model, PROMPT, 12)
    assert not is_paused(server.url)
    assert last > before
    assert answer_of(server.url) == (greedy(model, PROMPT, 12), last)
    sender.destroy()
    trainer.kill()
    trainer.join()


def is_paused(url: str) -> bool:
    """Whether requests wait. The engine tells it between two steps, so a transfer is not seen as a pause."""
    return bool(httpx.get(f"{url}/is_paused", headers={"authorization": f"Bearer {KEY}"}, timeout=5).json()["is_paused"])


@pytest.mark.slow
def test_a_stopped_trainer_is_told_what_the_server_says(server: ServerProcess) -> None:
    """An error of the group is that of the server, which knows more."""
    sender = WeightSender(server.url, KEY, timeout=1.5)
    sender.init_weight_transfer()
    group: Any = sender._group
    group.broadcast = lambda x: time.sleep(3) or WeightGroup.broadcast(group, x)
    before = answer_of(server.url)
    with pytest.raises(WeightTransferError, match=r"has answered 504: .*weight_transfer_failed"):
        sender.send_weights(make_trained(6).named_parameters())
    assert answer_of(server.url) == before, "nothing had come yet"
    del group.broadcast
    with pytest.raises(WeightTransferError, match="call init_weight_transfer first"):
        sender.send_weights(make_trained(6).named_parameters())


@in_a_thread
def test_several_servers_get_the_same_weights(
    server: ServerProcess, start_server: Callable[..., ServerProcess], model_folder: Path
) -> None:
    other = start_server(str(model_folder), "--served-model-name", "tiny", *SIZES, "--no-process", FA_SERVE_ADMIN_KEY=KEY)
    try:
        sender = WeightSender([server.url, other.url], KEY)
        sender.init_weight_transfer()
        model = make_trained(7)
        sender.send_weights(model.named_parameters())
        sender.destroy()
        assert answer_of(server.url)[0] == answer_of(other.url)[0] == greedy(model, PROMPT, 12)
    finally:
        other.end()
