"""A model that cannot be found is refused at once: with the reason, with the remedy, and after one question to the hub."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from fa_serve.engine import Engine, EngineConfig
from fa_serve.hf.info import describe
from fa_serve.hf.model_location import find_model, is_hub_name
from fa_serve.spec import ParameterError

NAME = "somebody/model"


@pytest.fixture
def set_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let the hub be at another address, with nothing downloaded from it."""

    def set_address(address: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    return set_address


@pytest.fixture
def hub(set_hub: Callable[[str], None]) -> Iterator[Callable[..., list[str]]]:
    """`asked = hub(404, "RepoNotFound")`: a hub that answers so, and the requests that it gets."""
    servers = []

    def start(status: int, code: str | None = None) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        set_hub(f"http://127.0.0.1:{server.server_port}")
        return asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "RepoNotFound", "is neither a folder nor a model at .*, or it is private: correct the name, or set HF_TOKEN"),
        (404, "RepoNotFound", "is neither a folder nor a model at .*: correct the name, or set HF_TOKEN"),
        (403, "GatedRepo", "needs a permission: ask for it at http.*/somebody/model, and set HF_TOKEN"),
        (404, "EntryNotFound", "has no config.json at http.*: name a model in the format of transformers"),
        (503, None, "cannot be loaded: http.*/somebody/model answers with 503"),
    ],
)
def test_what_the_hub_answers_is_one_sentence_after_one_question(
    hub: Callable[..., list[str]], status: int, code: str | None, said: str
) -> None:
    asked = hub(status, code)
    with pytest.raises(OSError, match=f"the model {NAME} {said}") as refused:
        find_model(NAME)
    assert "\n" not in str(refused.value)
    assert asked == [f"/{NAME}/resolve/main/config.json"]


def test_a_hub_that_cannot_be_reached_is_asked_once(set_hub: Callable[[str], None]) -> None:
    """Before: each of two tries of transformers tried six times, with 23 seconds of pauses."""
    set_hub("http://127.0.0.1:1")
    begin = time.monotonic()
    expected = (
        rf"the model {NAME} is not on this machine, and http://127.0.0.1:1 cannot be reached \(ConnectError: .*\): "
        "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a folder"
    )
    with pytest.raises(OSError, match=expected):
        Engine(EngineConfig(model=NAME, device="cpu"))
    with pytest.raises(OSError, match=expected):
        describe(NAME)
    for drafter in ("draft", "eagle3"):
        with pytest.raises(ParameterError, match=rf"speculative must name .*{expected}"):
            Engine(EngineConfig(device="cpu", num_pages=32, speculative=f"{drafter}={NAME}"))
    assert time.monotonic() - begin < 60, "the pauses alone were 90 s"


def test_without_the_hub_a_model_that_was_downloaded_is_not_asked_for(hub: Callable[..., list[str]]) -> None:
    asked = hub(503)
    folder = Path(constants.HF_HUB_CACHE) / "models--somebody--model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text("{}")
    find_model(NAME)
    assert asked == []


def test_offline_mode_is_named() -> None:
    with pytest.raises(OSError, match=r"is not on this machine, and .* cannot be reached .*offline mode.*HF_HUB_OFFLINE"):
        find_model(NAME)


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope", "nope/", "a/b/c", "~/model", "C:\\model", "a b", ""])
def test_a_path_is_no_hub_name(name: str) -> None:
    assert not is_hub_name(name)
    if name:
        with pytest.raises(ParameterError, match=r"model must be a hub name, such as Qwen/Qwen3-0\.6B, or an existing folder"):
            find_model(name)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"model must be a folder with a config\.json, as transformers saves a model, got"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    find_model(str(tmp_path))
