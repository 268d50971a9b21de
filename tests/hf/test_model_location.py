"""A model that cannot be found is refused at once: with the reason, with the remedy, and after one question to the hub."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig
from fa_serve.hf.info import describe
from fa_serve.hf.model_location import _files_of_model, find_model, find_snapshot
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
                if self.path != "/api/agent-harnesses":  # which the hub's client asks for by itself
                    asked.append(self.path)
                self.send_response(status)
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()

            do_GET = do_HEAD

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
        (403, "GatedRepo", "is gated: request access at http.*/somebody/model, and set HF_TOKEN"),
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


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope", "nope/", "a/b/c", "~/model", "C:\\model", "a b"])
def test_a_path_is_no_hub_name(name: str) -> None:
    with pytest.raises(ParameterError, match=r"model must be a hub name, such as Qwen/Qwen3-0\.6B, or an existing folder"):
        find_model(name)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"model must be a folder with a config\.json, as transformers saves a model, got"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({}))
    find_model(str(tmp_path))


def write_snapshot(commit: str, *refs: str, config: str = "{}") -> Path:
    """A revision as the hub's client has downloaded it."""
    folder = Path(constants.HF_HUB_CACHE) / "models--somebody--model"
    for ref in refs:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config)
    return snapshot


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is downloaded, and the hub is not asked."""
    find_snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_revision_that_was_downloaded_is_a_folder_without_the_hub(cache: Path) -> None:
    old = write_snapshot("1" * 40, "v1", "refs/pr/7")
    new = write_snapshot("2" * 40, "main")
    assert find_snapshot(NAME, "v1") == find_snapshot(NAME, "1" * 40) == find_snapshot(NAME, "refs/pr/7") == str(old)
    assert find_snapshot(NAME, "main") == str(new)
    with pytest.raises(OSError, match=rf"the model {NAME} at the revision v9 is not on this machine, and .* HF_HUB_OFFLINE"):
        find_snapshot(NAME, "v9")


@pytest.mark.parametrize("model", ["{tmp}", "./nope"])
def test_a_folder_has_no_revisions(cache: Path, tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    said = "revision must be left out for a folder" if model == "{tmp}" else "model must be a hub name"
    with pytest.raises(ParameterError, match=said):
        find_snapshot(model.replace("{tmp}", str(tmp_path)), "v1")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RevisionNotFound", "has no revision v1 at http.*/somebody/model: name a commit, a tag or a branch"),
        (404, "RepoNotFound", "is neither a folder nor a model at .*: correct the name, or set HF_TOKEN"),
        (403, "GatedRepo", "is gated: request access at http.*/somebody/model, and set HF_TOKEN"),
        (503, None, "at the revision v1 cannot be loaded: http.*/somebody/model answers with 503"),
    ],
)
def test_a_revision_is_asked_for_once(hub: Callable[..., list[str]], status: int, code: str | None, said: str) -> None:
    asked = hub(status, code)
    find_snapshot.cache_clear()
    with pytest.raises(OSError, match=f"the model {NAME} {said}") as refused:
        find_snapshot(NAME, "v1")
    assert "\n" not in str(refused.value)
    assert asked == [f"/api/models/{NAME}/revision/v1"]
    old = write_snapshot("1" * 40, "v1")
    assert find_snapshot(NAME, "v1") == str(old), "what was downloaded needs no hub"


LISTED = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "tokenizer.model",
    "modeling_own.py",
    "README.md",
    "onnx/model.onnx",
    "onnx/config.json",
    "original/model.safetensors",
    "1_Pooling/config.json",
    "2_Dense/pytorch_model.bin",
]


def test_only_what_transformers_reads_is_downloaded() -> None:
    read = [LISTED[0], *LISTED[2:3], *LISTED[5:7], "1_Pooling/config.json"]
    assert _files_of_model(LISTED, weights=False) == read
    assert _files_of_model(LISTED, weights=True) == [*read, LISTED[1], "2_Dense/pytorch_model.bin"]
    assert _files_of_model(["config.json", "pytorch_model.bin"], weights=True) == ["config.json", "pytorch_model.bin"]


REVISED = {"1" * 40: "v1", "2" * 40: "main"}


@pytest.fixture
def revised(cache: Path) -> dict[str, Path]:
    """Two revisions of a model that differ in weights, tokenizer and generation_config.json."""
    demo = model_path()
    found = {}
    for number, (commit, ref) in enumerate(REVISED.items(), start=1):
        folder = write_snapshot(commit, ref)
        shutil.copytree(demo, folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        norm = next(name for name in tensors if name.endswith("norm.weight"))
        tensors[norm] = tensors[norm] * number
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "generation_config.json").write_text(json.dumps({"temperature": number / 4, "do_sample": True}))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": f"template {number}"}))
        found[ref] = folder
    return found


@pytest.mark.parametrize("given", ["v1", "1" * 40, "main"])
def test_a_revision_holds_for_every_file(revised: dict[str, Path], given: str) -> None:
    ref = REVISED.get(given, given)
    expected = 1 if ref == "v1" else 2
    config = EngineConfig(model=NAME, revision=given, device="cpu", num_pages=32, dtype="float32")
    with contextlib.closing(Engine(config)) as engine:
        assert engine.config.revision == revised[ref].name, "the commit"
        assert engine.config.model_name == NAME
        assert engine.config.model_path() == str(revised[ref])
        assert engine.default_params.temperature == expected / 4
        assert engine.tokenizer.chat_template == f"template {expected}"
        model = engine._runner.model
        name = next(name for name, _ in model.named_parameters() if name.endswith("norm.weight"))
        [file] = revised[ref].glob("*.safetensors")
        stored = load_file(file)
        norm = next(each for each in stored if each.endswith("norm.weight"))
        assert dict(model.named_parameters())[norm].equal(stored[norm].float()), name
    described = describe(NAME, revision=given)
    assert described == describe(str(revised[ref]))


def test_a_branch_that_moves_is_one_commit_for_a_process(revised: dict[str, Path]) -> None:
    """Its files are read one after the other, and a rank or a process may ask later."""
    config = EngineConfig(model=NAME, revision="main").pin_revision()
    (revised["main"].parents[1] / "refs" / "main").write_text("1" * 40)
    assert config.revision == "2" * 40
    assert config.model_path() == str(revised["main"])
    assert config.for_drafts("other/model").revision is None
