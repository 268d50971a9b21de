"""Engines with a folder behind the host tier: a later engine finds the pages, unless anything that they depend on differs."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import BY_NAME
from peft_adapters import save_adapter
from server_process import one_layer
from tiny_models import VOCAB, make_model
from transformers import GenerationConfig
from warm_processes import warm_program

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
MEBIBYTE = 1 << 20


def prompts(count: int, length: int = 29, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]


def answers(engine: Engine, given: list[list[int]]) -> list[tuple[list[int], int]]:
    """Tokens and how many of the prompt were cached, one prompt after the other."""
    return [(each.token_ids, each.num_cached_tokens) for prompt in given for each in engine.generate([prompt], GREEDY)]


def saved(engine: Engine) -> None:
    while engine.prepare_one():
        pass


@pytest.fixture
def open_engine(make_engine: Callable[..., Engine], tmp_path: Path) -> Callable[..., Engine]:
    def start(**settings: Any) -> Engine:
        return make_engine(**{"num_pages": 18, "kv_host_memory": MEBIBYTE, "kv_host_folder": tmp_path / "kv"} | settings)

    return start


def hybrid() -> Any:
    torch.manual_seed(0)
    model = BY_NAME["qwen3.5"].build(vocab_size=VOCAB)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    return model


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(make_model, {}, id="llama"),
        pytest.param(make_model, {"kv_cache_dtype": "fp8"}, id="float8"),
        pytest.param(make_model, {"deterministic": True}, id="deterministic"),
        pytest.param(make_model, {"speculative": "ngram"}, id="drafts"),
        pytest.param(hybrid, {"num_states": 5}, id="states"),
    ],
)
def test_a_later_engine_has_the_same_tokens_from_files(open_engine, make_engine, build, settings) -> None:
    given = prompts(4)
    model = build()
    plain = make_engine(model=model, num_pages=200, **settings | {"num_states": None})
    expected = [tokens for tokens, _ in answers(plain, [*given, *given])]
    engine = open_engine(model=model, **settings)
    assert [tokens for tokens, _ in answers(engine, given)] == expected[:4]
    saved(engine)
    engine.close()
    later = open_engine(model=model, **settings)
    assert answers(later, given) == [(tokens, 28) for tokens in expected[4:]]
    stats = later.stats().host_tier
    assert stats.folder.num_hits == 28
    assert (stats.folder.num_bad, stats.folder.num_failures) == (0, 0)
    later.check_integrity()


def other_weights() -> Any:
    model = make_model()
    with torch.no_grad():
        next(iter(model.parameters()))[3, 1] += 2**-10
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(other_weights, {}, id="one weight"),
        pytest.param(lambda: make_model("mistral"), {}, id="model"),
        pytest.param(make_model, {"page_size": 8}, id="page size"),
        pytest.param(make_model, {"kv_cache_dtype": "fp8"}, id="dtype of the cache"),
        pytest.param(lambda: make_model().to(torch.bfloat16), {}, id="dtype"),
        pytest.param(make_model, {"deterministic": True}, id="deterministic"),
    ],
)
def test_files_of_another_engine_are_not_read(open_engine, build, settings) -> None:
    given = prompts(2)
    first = open_engine()
    answers(first, given)
    saved(first)
    assert first.stats().host_tier.folder.num_bytes_used > 0
    other = open_engine(model=build(), **settings)
    assert [cached for _, cached in answers(other, given)] == [0, 0]
    assert other.stats().host_tier.folder.num_hits == 0
    assert [cached for _, cached in answers(open_engine(), given)] == [28, 28], "the first one's are still there"


def test_files_come_back_to_their_salt_only(open_engine) -> None:
    [given] = prompts(1)

    def cached(engine: Engine, salt: str | None) -> int:
        engine.add_request("one", given, GREEDY, cache_salt=salt)
        found = 0
        while engine.has_unfinished():
            found = max([found, *(output.num_cached_tokens for output in engine.step())])
        return found

    engine = open_engine()
    assert cached(engine, "salt") == 0
    saved(engine)
    engine.close()
    later = open_engine()
    assert [cached(later, salt) for salt in (None, "other", "salt")] == [0, 0, 28]


@pytest.mark.slow
def test_files_come_back_to_the_content_of_an_adapter(open_engine, tmp_path: Path) -> None:
    """Names, and the order in which adapters are loaded, say nothing of a later engine's."""
    [given] = prompts(1)
    folders = [save_adapter(tmp_path / name, seed=seed, r=4) for seed, name in enumerate(("one", "two"))]
    settings = {"lora_bytes": 1 << 26, "max_lora_rank": 16}
    engine = open_engine(**settings)
    engine.load_adapter("first", folders[0])
    before = engine.generate([given], GREEDY, adapter="first")[0]
    saved(engine)
    engine.close()
    later = open_engine(**settings)
    later.load_adapter("first", folders[1])
    later.load_adapter("second", folders[0])
    found = {name: later.generate([given], GREEDY, adapter=name)[0] for name in (None, "first", "second")}
    assert [each.num_cached_tokens for each in found.values()] == [0, 0, 28]
    assert found["second"].token_ids == before.token_ids


@pytest.mark.slow
def test_new_weights_neither_read_nor_write_files(open_engine, tmp_path: Path, caplog) -> None:
    given = prompts(4)
    engine = open_engine()
    answers(engine, given)
    saved(engine)
    files = {path.name for path in (tmp_path / "kv").rglob("*.page")}
    engine.update_weights((name, x * 1.01) for name, x in [*engine.model.named_parameters()])
    assert "no longer used, because the weights have changed" in caplog.text
    assert [cached for _, cached in answers(engine, given)] == [0] * 4
    saved(engine)
    engine.close()
    assert {path.name for path in (tmp_path / "kv").rglob("*.page")} == files


def test_an_engine_that_has_slept_finds_its_files(open_engine) -> None:
    given = prompts(3)
    engine = open_engine()
    before = answers(engine, given)
    saved(engine)
    engine.sleep(1)
    engine.wake_up()
    assert answers(engine, given) == [(tokens, 28) for tokens, _ in before]


def test_two_engines_have_one_folder(open_engine) -> None:
    """The second one is open already when the first one writes."""
    given = prompts(3)
    first = open_engine()
    second = open_engine()
    before = answers(first, given)
    saved(first)
    folder = second._scheduler.tier.folder
    folder._next_scan = 0.0
    deadline = time.monotonic() + 20
    while folder.index.num_bytes == 0 and time.monotonic() < deadline:
        second._scheduler.tier.begin_step()
        time.sleep(0.01)
    assert answers(second, given) == [(tokens, 28) for tokens, _ in before]


KILLED = """
import sys, threading, os
from fa_serve.engine import Engine, EngineConfig, SamplingParams
config = EngineConfig(model=sys.argv[2], kv_host_memory=1 << 20, kv_host_folder=sys.argv[1], num_pages=40, device="cpu")
engine = Engine(config)
number = 0
print("ready", flush=True)
while True:
    number += 1
    engine.generate([[number % 97 + 3 + k for k in range(200)]], SamplingParams(max_tokens=2, temperature=0.0))
    engine.prepare_one()
"""


@pytest.mark.slow
def test_what_a_killed_engine_has_written_is_right(tmp_path: Path) -> None:
    """It is killed while it writes. Each file that is there can be read, and gives the tokens of an engine without a folder."""
    model = one_layer()
    process = warm_program(KILLED, str(tmp_path), model)
    try:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while len([*tmp_path.rglob("*.page")]) < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    given = [[number % 97 + 3 + k for k in range(200)] for number in range(1, 6)]
    engine = Engine(EngineConfig(model=model, kv_host_memory=MEBIBYTE, kv_host_folder=tmp_path, num_pages=40, device="cpu"))
    plain = Engine(EngineConfig(model=model, num_pages=40, device="cpu"))
    try:
        found = answers(engine, given)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in answers(plain, given)]
        assert max(cached for _, cached in found) == 192
        assert engine.stats().host_tier.folder.num_bad == 0
    finally:
        engine.close()
        plain.close()


def test_a_folder_needs_the_hosts_memory() -> None:
    with pytest.raises(ParameterError, match="kv_host_folder must be None unless kv_host_memory is set"):
        EngineConfig(kv_host_folder="kv")
    with pytest.raises(ParameterError, match="kv_host_folder_bytes must be a positive integer"):
        EngineConfig(kv_host_memory=1, kv_host_folder="kv", kv_host_folder_bytes=0)


def test_a_folder_that_cannot_be_written_is_refused(make_engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ParameterError, match="kv_host_folder must be a folder that can be read and written"):
        make_engine(kv_host_memory=MEBIBYTE, kv_host_folder=tmp_path / "file")
