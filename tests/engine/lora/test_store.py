"""Adapters in a small pool, replaced, evicted, read again; and everything that the engine does to a request beside them."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import ATTENTION, PeftForwards, save_adapter, write_over
from safetensors.torch import load_file, save_file
from tiny_models import greedy, make_model, random_prompts

from fa_serve.engine import SamplingParams, StructuredOutput
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.lora import store as store_module
from fa_serve.engine.parallel.ranks import Alone
from fa_serve.hf.lora.format import LoraAdapter, LowRank, read_adapter
from fa_serve.hf.lora.memory import LoraMemory
from fa_serve.ops.lora import fallback
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LORA = {"lora_bytes": 1 << 26, "max_lora_rank": 16, "max_num_seqs": 8}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, seed=seed, r=4 + seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def peft(folders) -> PeftForwards:
    return PeftForwards(make_model(), folders)


@pytest.fixture
def engine(make_engine, folders):
    made = make_engine(**LORA)
    for name, folder in folders.items():
        made.load_adapter(name, folder)
    return made


def answers(engine, names, prompts, params=GREEDY) -> list[list[int]]:
    return [found.token_ids for found in engine.generate(prompts, params, adapter=names)]


def assert_right(engine, peft, names, prompts, params=GREEDY) -> None:
    for name, prompt, found in zip(names, prompts, answers(engine, names, prompts, params), strict=True):
        assert found == peft.choose(name, prompt, found), name
    engine.check_integrity()


def test_adapters_share_no_cached_prefix(engine, peft) -> None:
    names = ["a", None, "b", "a", None]
    for name in names:
        assert_right(engine, peft, [name], [PROMPT])
    cached = [engine.generate([PROMPT], GREEDY, adapter=name)[0].num_cached_tokens for name in ("a", "b", "c", None)]
    assert cached == [16, 16, 0, 16]


def test_a_salt_and_an_adapter_are_told_apart(engine) -> None:
    table = engine._scheduler.pages
    chains = []
    for salt, adapter in ((None, 0), (None, 1), ("", 0), ("", 1), ("x", 0), ("x", 1), ("x", 256)):
        hashes: list[bytes] = []
        table.hash_pages(PROMPT, hashes, salt, adapter)
        chains.append(hashes[0])
    assert len(set(chains)) == len(chains)


def test_chunks_preemption_and_shared_prompts(make_engine, folders, peft) -> None:
    engine = make_engine(**LORA | {"max_num_batched_tokens": 9, "num_pages": 14, "max_model_len": 40})
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    prompts = random_prompts(8, longest=30)
    assert_right(engine, peft, ["a", "b", None, "c", "a", None, "b", "b"], prompts, replace(GREEDY, max_tokens=9))
    assert engine.stats().num_preemptions > 0


def test_graphs_with_and_without_adapters(make_engine, folders, peft, replays) -> None:
    engine = make_engine(**LORA)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    engine._runner.make_graphs()
    prompts = random_prompts(5, longest=12)
    for names in (["a", None, "b", "c", "a"], [None] * 5, ["c"] * 5):
        assert_right(engine, peft, names, prompts)
    shapes = {(shape.lora, shape.kind) for shape in engine._runner._graphs._replays}
    assert {(True, "nothing"), (False, "nothing")} <= shapes
    assert replays


def test_graphs_are_captured_ahead_for_both(make_engine, replays) -> None:
    engine = make_engine(**LORA | {"max_num_seqs": 2, "max_num_batched_tokens": 64})
    engine._runner.make_graphs()
    while engine.prepare_one():
        pass
    graphs = engine._runner._graphs._replays
    assert {shape._replace(lora=True) for shape in graphs if not shape.lora} == {shape for shape in graphs if shape.lora}


@pytest.mark.slow
def test_speculation_changes_no_token(make_engine, folders, peft) -> None:
    engine = make_engine(**LORA | {"speculative": "ngram"})
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    prompts = [[5, 6, 7, 8] * 5, [9, 9, 9, 9, 9, 9], [5, 6, 7, 8] * 4]
    assert_right(engine, peft, ["a", None, "b"], prompts, replace(GREEDY, max_tokens=24))
    assert engine.stats().speculation.num_drafts > 0


def test_structured_output_is_chosen_by_the_adapter(engine, peft) -> None:
    params = replace(GREEDY, max_tokens=16, structured=StructuredOutput(choice=("fox", "dog", "quick", "lazy")))
    found = engine.generate([PROMPT] * 4, params, adapter=["a", "b", "c", None])
    assert {each.text for each in found} <= {"fox", "dog", "quick", "lazy"}
    first = [each.token_ids[0] for each in found]
    allowed = {engine.tokenizer(text, add_special_tokens=False).input_ids[0] for text in ("fox", "dog", "quick", "lazy")}
    assert set(first) <= allowed | set(range(320))


def test_answers_to_one_prompt_have_its_adapter(engine, peft) -> None:
    found = engine.generate([PROMPT], replace(GREEDY, n=3), adapter="b")
    assert {tuple(each.token_ids) for each in found} == {tuple(peft.choose("b", PROMPT, found[0].token_ids))}


@pytest.mark.slow
def test_many_adapters_go_through_a_small_pool(make_engine, tmp_path) -> None:
    """200 adapters, of which 4 are in memory at a time and 8 on the host. Each answers with its own mark."""
    engine = make_engine(**LORA | {"lora_bytes": 4 * 16 * 3000 * 4, "max_lora_rank": 16, "num_pages": 256})
    store = engine.adapters
    assert 4 <= store.pool.num_pages <= 8
    marks = [3 + number for number in range(200)]
    model = make_model()
    for number, mark in enumerate(marks):
        row = model.lm_head.weight.detach()[mark]
        folder = write_mark(tmp_path / str(number), row, model.config.intermediate_size)
        engine.load_adapter(f"mark-{number}", folder)
        store._host_bytes = 8 * store._host[store.find("mark-0")].num_bytes if number == 0 else store._host_bytes
    prompts = random_prompts(400, longest=6)
    names = [f"mark-{number % 200}" for number in range(400)]
    found = engine.generate(prompts, replace(GREEDY, max_tokens=2), adapter=names)
    assert [each.token_ids for each in found] == [[marks[number % 200]] * 2 for number in range(400)]
    assert store.pool.num_loads >= 200
    assert len(store._host) <= 8
    assert store.pool.num_held == 0
    engine.check_integrity()


def write_mark(folder: Path, row: torch.Tensor, width: int) -> Path:
    """An adapter whose last layer adds a row of the head, so that greedy takes its token, whatever came before.

    row: of the head, (hidden,); width: columns of the layer's last projection
    """
    folder.mkdir()
    name = "base_model.model.model.layers.1.mlp.down_proj"
    given = {
        f"{name}.lora_A.weight": torch.zeros(1, width),
        f"{name}.lora_B.weight": torch.zeros(len(row), 1),
        f"{name}.lora_B.bias": 1e3 * row / row.norm() ** 2,
    }
    save_file(given, folder / "adapter_model.safetensors")
    config = '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "lora_bias": true}'
    (folder / "adapter_config.json").write_text(config)
    return folder


def test_a_name_may_get_another_adapter(engine, folders, peft) -> None:
    before = answers(engine, "a", [PROMPT])
    engine.add_request("running", PROMPT, GREEDY, adapter="a")
    engine.step()
    engine.load_adapter("a", folders["b"])
    tokens = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert [*tokens][-5:] == before[0][-5:], "a request that runs keeps its adapter"
    assert answers(engine, "a", [PROMPT]) == [peft.choose("b", PROMPT, answers(engine, "b", [PROMPT])[0])]
    engine.check_integrity()


def test_an_unloaded_adapter_finishes_what_it_has(engine, peft) -> None:
    engine.add_request("running", PROMPT, GREEDY, adapter="c")
    engine.unload_adapter("c")
    tokens = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == peft.choose("c", PROMPT, tokens)
    assert engine.adapters.names == ["a", "b"]
    with pytest.raises(ParameterError, match=r"be the name of a loaded adapter \(a, b\)"):
        engine.generate([PROMPT], GREEDY, adapter="c")
    assert len(engine.adapters._host) == 2, "nothing is kept of it"
    engine.check_integrity()


def test_files_that_have_changed_are_not_mixed_with_what_is_cached(engine, folders, tmp_path) -> None:
    folder = shutil.copytree(folders["a"], tmp_path / "copy")
    engine.load_adapter("copy", folder)
    engine.adapters._host.clear()
    save_adapter(tmp_path / "other", seed=9, r=6)
    shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
    engine.add_request("late", PROMPT, GREEDY, adapter="copy")
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].error.code == "adapter_failed"
    assert "its files have changed" in outputs[-1].error.message
    assert len(answers(engine, None, [PROMPT])[0]) == 6, "others go on"
    engine.check_integrity()


def test_an_adapter_that_is_served_does_not_lie_in_its_file(engine, tmp_path) -> None:
    folder = save_adapter(tmp_path / "copy", seed=4, r=6)
    store = engine.adapters
    engine.load_adapter("copy", folder)
    store._reader.submit(int).result()  # what was queued before has ended
    expected = answers(engine, "copy", [PROMPT])
    store.pool.drop(store.find("copy"))  # it is copied to the device again
    write_over(folder)
    assert answers(engine, "copy", [PROMPT[::-1]]) != answers(engine, None, [PROMPT[::-1]])
    assert not store._host[store.find("copy")].borrows
    assert expected != answers(engine, None, [PROMPT])


def test_the_adapter_of_a_training_run_comes_from_memory(engine) -> None:
    draw = torch.Generator().manual_seed(3)
    low = LowRank(torch.randn(4, 32, generator=draw), torch.randn(64, 4, generator=draw), 0.1)
    adapter = LoraAdapter({"model.layers.0.self_attn.q_proj": low})
    engine.adapters.add("training", engine.adapters.pack(adapter))
    first = answers(engine, "training", [PROMPT])
    assert first != answers(engine, None, [PROMPT])
    engine.adapters.add(
        "training", engine.adapters.pack(LoraAdapter({"model.layers.0.self_attn.q_proj": replace(low, b=0 * low.b)}))
    )
    assert answers(engine, "training", [PROMPT]) == answers(engine, None, [PROMPT])
    with pytest.raises(ParameterError, match="have finite numbers"):
        engine.adapters.pack(LoraAdapter({"model.layers.0.self_attn.q_proj": replace(low, a=low.a / 0.0)}))


class TwoRanks(Alone):
    """Rank 0 of two. other: what the other one has, in the place of this rank's value"""

    size = 2

    def __init__(self, other: Callable[[Any], Any]) -> None:
        super().__init__(torch.device("cpu"))
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other(value)]


def store_of_two(other: Callable[[Any], Any]) -> store_module.AdapterStore:
    model = make_model()
    memory = LoraMemory(model, budget=1 << 24, max_rank=16, max_pages=4)
    return store_module.AdapterStore(memory, 1 << 24, ranks=TwoRanks(other))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda own: own._replace(refusal="no such file"),
            r"be one that every rank can load \(rank 1 refuses it: no such file\)",
        ),
        (lambda own: own._replace(content=own.content + 1), "consist of the same files on every rank and machine"),
    ],
)
def test_another_rank_may_refuse_an_adapter(folders, other, message) -> None:
    store = store_of_two(other)
    with pytest.raises(ParameterError, match=message):
        store.load("x", folders["a"], store.begin(folders["a"]))
    assert store.names == []
    assert store._readings == {}
    store.close()


def test_what_ranks_know_of_an_adapter_is_the_same(folders) -> None:
    """Another rank may have outer weights where this one has those of the base, and another device may load longer."""
    store = store_of_two(lambda own: own._replace(outer_bytes=1000, is_eager=True))
    adapter = store.load("x", folders["a"])
    assert (adapter.outer_bytes, adapter.is_eager, adapter.num_pages) == (1000, True, 1)
    assert pickle.loads(pickle.dumps(adapter)) == adapter, "requests bring it to other ranks"
    again = store.load("x", folders["a"])
    assert (again.number, again == adapter) == (adapter.number, False), "numbered by its content, and loaded again"
    ranks = store._ranks
    for outcome, ready in ((None, False), ("", True)):
        ranks.other = lambda own, outcome=outcome: [outcome for _ in own]
        store.pool.hold(again)
        store._loads[again].result()
        store.settle()
        assert store.pool.is_ready(again) is ready
    store.close()


def test_files_that_change_while_they_are_read_are_refused(engine, folders, tmp_path, monkeypatch) -> None:
    """Their state would be noted for other numbers: what is read again later would pass for what is in the prefix cache."""
    folder = shutil.copytree(folders["a"], tmp_path / "live")
    read = store_module.read_adapter

    def read_and_replace(*args: Any, **options: Any) -> LoraAdapter:
        found = read(*args, **options)
        shutil.copy(folders["b"] / "adapter_model.safetensors", folder)
        return found

    monkeypatch.setattr(store_module, "read_adapter", read_and_replace)
    with pytest.raises(ParameterError, match="have files that do not change while they are read"):
        engine.load_adapter("live", folder)
    assert "live" not in engine.adapters.names


def test_files_that_change_before_an_adapter_is_served(make_engine, folders, tmp_path) -> None:
    """The engine reads an adapter some time before it serves it. It notes the state of the files that it has read."""
    engine = make_engine(**LORA | {"max_num_seqs": 1})
    store = engine.adapters
    store._host_bytes = 1 << 20
    folder = shutil.copytree(folders["a"], tmp_path / "live")
    reading = engine.read_adapter(folder)
    store._readings[reading].result()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folders["b"] / name, folder)
    engine.load_adapter("live", folder, reading)
    [first] = answers(engine, ["live"], [PROMPT])
    store._host_bytes = 1
    store._serve("c", None, store.pack(read_adapter(folders["c"])), 0, False)
    assert answers(engine, ["c"], [PROMPT]) != [first], "which takes its place on the device and on the host"
    [again] = engine.generate([PROMPT], GREEDY, adapter="live")
    assert again.token_ids in ([], first), "other numbers than those of the prefix cache"
    assert again.finish_reason == "error"


def test_an_adapter_that_nobody_wants_when_it_is_loaded_is_forgotten(engine, folders, monkeypatch) -> None:
    """Unloaded and aborted while a thread loads it, it would stay on the host for ever."""
    store = engine.adapters
    known = {*store._host}
    go_on = threading.Event()
    load = store._load
    monkeypatch.setattr(store, "_load", lambda *args: go_on.wait(30) and load(*args))
    for i in range(3):
        go_on.clear()
        engine.load_adapter("x", folders["abc"[i]])
        engine.add_request(f"request {i}", PROMPT, GREEDY, adapter="x")
        engine.step()
        loads = [*store._loads.values()]
        engine.unload_adapter("x")
        engine.abort(f"request {i}")
        go_on.set()
        for each in loads:
            each.result()
    answers(engine, ["a"], [PROMPT])
    assert {*store._host} <= known
    engine.check_integrity()


def test_a_load_keeps_nothing_when_it_has_ended(engine) -> None:
    """The tier on the host bounds what is kept there, and a load has the same numbers."""
    answers(engine, ["a", "b", "c"], [PROMPT] * 3)
    assert (engine.adapters._loads, engine.adapters._ended) == ({}, {})


def test_a_load_that_fails_on_another_rank_fails(folders) -> None:
    store = store_of_two(lambda own: own)
    adapter = store.load("x", folders["a"])
    store._ranks.other = lambda own: ["disk full" for _ in own]
    store.pool.join(adapter)
    store.pool.hold(adapter)
    store._loads[adapter].result()
    store.settle()
    with pytest.raises(ParameterError, match=r"rank 1 refuses it: disk full"):
        store.pool.is_ready(adapter)
    store.pool.release(adapter)
    assert adapter not in store.pool, "its memory is free"
    store.close()


# Each of these faults must be seen: the test of tokens is worth nothing if it does not see them.


def wrong_segment(monkeypatch, engine) -> None:
    entries = fallback._entries_by_slot
    monkeypatch.setattr(
        fallback, "_entries_by_slot", lambda batch: dict(zip(entries(batch), reversed(entries(batch).values()), strict=True))
    )


def stale_slot(monkeypatch, engine) -> None:
    memory = engine.adapters.memory
    write = memory.write
    monkeypatch.setattr(memory, "write", lambda packed, slot, pages: write(packed, 0, pages))


def alpha_ignored(monkeypatch, engine) -> None:
    memory = engine.adapters.memory
    write = memory.write

    def forget(packed, slot, pages) -> None:
        write(packed, slot, pages)
        scales = memory._numbers[0, slot].view(torch.float32)
        scales[scales != 0] = 1.0

    monkeypatch.setattr(memory, "write", forget)


def shared_prefix(monkeypatch, engine) -> None:
    table = engine._scheduler.pages
    monkeypatch.setattr(table, "_root", lambda salt, adapter: b"")


@pytest.mark.parametrize("fault", [wrong_segment, stale_slot, alpha_ignored, shared_prefix])
def test_faults_are_seen(engine, peft, monkeypatch, fault) -> None:
    fault(monkeypatch, engine)
    names = ["a", "b", None, "c"]
    prompts = [PROMPT, PROMPT, random_prompts(1)[0], PROMPT]
    if fault is shared_prefix:
        answers(engine, None, [PROMPT])
    found = answers(engine, names, prompts)
    wrong = [name for name, prompt, each in zip(names, prompts, found, strict=True) if each != peft.choose(name, prompt, each)]
    assert wrong, "the fault was not seen"
    assert None not in wrong


def test_a_pool_that_is_too_small_is_refused_with_the_bytes_it_needs(make_engine) -> None:
    with pytest.raises(ParameterError, match="lora_bytes must be at least") as caught:
        make_engine(lora_bytes=1000)
    assert caught.value.field == "lora_bytes"


def test_what_has_no_adapters_says_so(make_engine, folders) -> None:
    engine = make_engine()
    for call in (lambda: engine.load_adapter("a", folders["a"]), lambda: engine.generate([PROMPT], GREEDY, adapter="a")):
        with pytest.raises(ParameterError, match=r"lora_bytes must be positive to serve adapters \(--lora-bytes 1GiB\), got 0"):
            call()
    with pytest.raises(ParameterError, match="lora"):
        EngineConfig(lora_bytes=1 << 20, deterministic=True)
    assert answers(engine, None, [PROMPT])[0] == greedy(make_model(), PROMPT, 6)


def test_the_start_says_which_adapter_is_one_of_another_model(make_engine, tmp_path) -> None:
    weights = save_adapter(tmp_path / "other") / "adapter_model.safetensors"
    save_file({name.replace("layers.0", "layers.9"): x for name, x in load_file(weights).items()}, weights)
    with pytest.raises(ParameterError, match=r"lora must name adapters that fit the model: model.layers.9.*french=") as caught:
        make_engine(lora=[f"french={tmp_path / 'other'}"])
    assert caught.value.field == "lora"


@pytest.mark.parametrize("name", ["a/b", "", "..", "x" * 129, "a b", "-a", "a\n", None])
def test_names(engine, folders, name) -> None:
    with pytest.raises(ParameterError) as caught:
        engine.load_adapter(name, folders["a"])
    assert caught.value.field == "lora_name"


def test_a_folder_is_a_path(engine) -> None:
    with pytest.raises(ParameterError, match="adapter must be the path of a folder, got None"):
        engine.load_adapter("a", None)


def test_an_adapter_of_another_model_is_refused(engine, tmp_path) -> None:
    other = make_model("qwen3-moe")
    folder = save_adapter(tmp_path / "moe", model=other, target_modules=ATTENTION, r=20)
    with pytest.raises(ParameterError, match="be at most 16"):
        engine.load_adapter("x", folder)
    assert engine.adapters.names == ["a", "b", "c"]


def test_an_adapter_is_read_by_one_thread_and_others_keep_theirs(make_engine, folders, monkeypatch) -> None:
    seen = []
    read = store_module.read_adapter
    monkeypatch.setattr(
        store_module, "read_adapter", lambda *given, **words: seen.append(torch.get_num_threads()) or read(*given, **words)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = make_engine(**LORA)
        readers = [threading.Thread(target=engine.adapters.read, args=[folders["a"]]) for _ in range(2)]
        for reader in readers:
            reader.start()
        with ThreadPoolExecutor(1) as late:
            assert late.submit(torch.get_num_threads).result() == 2, "a thread that begins beside a read"
        for reader in readers:
            reader.join()
        assert seen == [1, 1]
        with ThreadPoolExecutor(1) as late:
            assert late.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
