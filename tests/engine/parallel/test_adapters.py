"""Adapters on two ranks, which are processes: peft's tokens, one decision about what is loaded, and refusals on all ranks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import ATTENTION, PeftForwards, save_adapter
from quantised_copies import copy_of, dequantised, load
from safetensors.torch import save_file
from sampled_cases import each_nth
from server_process import few_layers
from streams import collect
from tiny_models import CONFIGS, make_model, make_tokenizer, random_prompts
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, SamplingParams
from fa_serve.engine.errors import EngineDeadError
from fa_serve.hf.lora.format import LoraAdapter, LowRank
from fa_serve.spec import ParameterError

pytestmark = pytest.mark.usefixtures("warm_followers")

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(40, 60))


def tied() -> PreTrainedModel:
    return _made("qwen3", tie_word_embeddings=True)


def one_kv_head() -> PreTrainedModel:
    """Both ranks have the same head of keys and values."""
    return _made("llama", num_key_value_heads=1)


def _made(family: str, **sizes: Any) -> PreTrainedModel:
    config = CONFIGS[family]()
    for name, value in sizes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    own = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **own)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    return model.eval()


BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": tied,
    "llama": make_model,
    "one head of keys": one_kv_head,
    "qwen3": partial(make_model, "qwen3"),
}


def save_model(folder: Path, base: Callable[[], PreTrainedModel] = make_model) -> Path:
    base().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def start(folder: Path, **settings: Any) -> Engine:
    sizes = {"device": "cpu", "dtype": "float32", "seed": 3, "page_size": 8, "num_pages": 64, "max_model_len": 96}
    lora = {"lora_bytes": 1 << 26, "max_lora_rank": 32, "max_num_seqs": 16, "tensor_parallel": 2}
    return Engine(EngineConfig(**sizes | lora | {"model": folder} | settings))


def close(engine: Engine) -> None:
    """The follower has checked its integrity as well, and ends without an error."""
    engine.check_integrity()
    [link] = engine._ranks._links
    engine.close()
    assert link.process.returncode == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, seed=seed, r=4 + seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def peft(folders: dict[str, Path]) -> PeftForwards:
    return PeftForwards(make_model(), folders)


@pytest.fixture
def engine(llama: Path, folders: dict[str, Path]) -> Iterator[Engine]:
    """Two ranks with three adapters, the first of which the settings name."""
    made = start(llama, lora=[f"a={folders['a']}"])
    for name in "bc":
        made.load_adapter(name, folders[name])
    yield made
    close(made)


def answers(engine: Engine, names: Any, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [found.token_ids for found in engine.generate(prompts, params, adapter=names)]


def finish(engine: Engine, name: str) -> list[int]:
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() if output.request_id == name for token in output.token_ids]
    return tokens


def special(name: str) -> dict[str, Any]:
    """An adapter of the outer weights. peft has no low-rank adapter of both where these are tied."""
    if name == "tied":
        return {"target_modules": [*ATTENTION, "embed_tokens"]}
    return {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", each_nth(2, [*BASES]))
def test_tokens_are_those_of_one_rank_and_of_peft(tmp_path: Path, name: str) -> None:
    """Alone and mixed with the base: small and large ranks, biases, and adapters of the embedding and the head."""
    base = BASES[name]
    kinds = {"small": {"r": 2}, "two-pages": {"r": 20}, "bias": {"lora_bias": True}, "outer": special(name)}
    folders = {kind: save_adapter(tmp_path / kind, model=base(), seed=i, **own) for i, (kind, own) in enumerate(kinds.items())}
    model = save_model(tmp_path / "model", base)
    prompts = random_prompts(10, longest=20)
    names = [*([*folders, None] * 2)]
    results = []
    for size in (1, 2):
        engine = start(model, tensor_parallel=size)
        for kind, folder in folders.items():
            engine.load_adapter(kind, folder)
        mixed = answers(engine, names, prompts)
        assert [answers(engine, one, [prompt])[0] for one, prompt in zip(names, prompts, strict=True)][:5] == mixed[:5]
        results.append(mixed)
        close(engine) if size == 2 else engine.close()
    assert results[0] == results[1]
    peft = PeftForwards(base(), folders)
    for one, prompt, found in zip(names, prompts, results[1], strict=True):
        assert found == peft.choose(one, prompt, found), one
    assert len({tuple(peft.choose(one, PROMPT, [5, 6, 7])) for one in (*folders, None)}) == 5


@pytest.mark.slow
def test_layers_that_are_not_fused_have_adapters(llama: Path, folders: dict[str, Path], peft: PeftForwards) -> None:
    engine = start(llama, fusion=False, speculative="ngram", max_num_batched_tokens=17)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    prompts = [[5, 6, 7, 8] * 5, [9] * 6, *random_prompts(3)]
    names = ["a", None, "b", "c", "a"]
    for name, prompt, found in zip(names, prompts, answers(engine, names, prompts), strict=True):
        assert found == peft.choose(name, prompt, found), name
    close(engine)


def check_mixed(model: Path, base: PreTrainedModel, folders: dict[str, Path]) -> None:
    engine = start(model)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    peft = PeftForwards(base, folders)
    prompts = [[token % engine.vocab_size for token in prompt] for prompt in random_prompts(6, longest=12)]
    names = [*([*folders, None] * 3)[:6]]
    for name, prompt, found in zip(names, prompts, answers(engine, names, prompts), strict=True):
        assert found == peft.choose(name, prompt, found), name
    assert len({tuple(answers(engine, name, prompts[:1])[0]) for name in (*folders, None)}) == len(folders) + 1
    close(engine)


@pytest.mark.slow
def test_experts_and_routers_have_adapters(tmp_path: Path) -> None:
    base = partial(make_model, "qwen3-moe")
    own = {"experts": {"target_modules": "all-linear"}, "attention": {"target_modules": ATTENTION}}
    folders = {
        name: save_adapter(tmp_path / name, model=base(), seed=i, **given) for i, (name, given) in enumerate(own.items())
    }
    check_mixed(save_model(tmp_path / "model", base), base(), folders)


@pytest.mark.slow
def test_an_int4_base_has_adapters(tmp_path: Path) -> None:
    model = copy_of(Path(few_layers(2)), "gptq", tmp_path, group_size=32)

    def base() -> PreTrainedModel:
        return dequantised(load(model, dtype="float32"))

    check_mixed(model, base(), {name: save_adapter(tmp_path / name, model=base(), seed=i) for i, name in enumerate("ab")})


def write_mark(folder: Path, row: torch.Tensor, width: int) -> Path:
    """An adapter whose last layer adds a row of the head by its bias, so that greedy takes its token.

    A rank that added the bias as well would change nothing here, so the bias is not what this adapter shows.
    """
    folder.mkdir()
    name = "base_model.model.model.layers.1.mlp.down_proj"
    given = {
        f"{name}.lora_A.weight": torch.zeros(1, width),
        f"{name}.lora_B.weight": torch.zeros(len(row), 1),
        f"{name}.lora_B.bias": 1e3 * row / row.norm() ** 2,
    }
    save_file(given, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "lora_bias": true}')
    return folder


@pytest.mark.slow
def test_many_adapters_go_through_a_small_pool(tmp_path: Path, llama: Path) -> None:
    """60 adapters, of which few are in memory at a time and a few on the host of each rank. Each answers with its own mark."""
    model = make_model()
    page = 16 * 3000 * 2  # of a rank, about
    engine = start(llama, lora_bytes=4 * page, max_lora_rank=16, max_num_seqs=8)
    store = engine.adapters
    assert 4 <= store.pool.num_pages <= 8
    marks = [3 + number for number in range(60)]
    for number, mark in enumerate(marks):
        folder = write_mark(tmp_path / str(number), model.lm_head.weight.detach()[mark], model.config.intermediate_size)
        engine.load_adapter(f"mark-{number}", folder)
        store._host_bytes = 8 * store._host[store.find("mark-0")].num_bytes if number == 0 else store._host_bytes  # of rank 0
    names = [f"mark-{number % 60}" for number in range(120)]
    found = answers(engine, names, random_prompts(120, longest=6), replace(GREEDY, max_tokens=2))
    assert found == [[marks[number % 60]] * 2 for number in range(120)]
    assert store.pool.num_loads >= 60
    assert len(store._host) < 20
    assert store.pool.num_held == 0
    close(engine)


@pytest.mark.slow
def test_adapters_come_and_go_while_requests_run(engine: Engine, folders: dict[str, Path], peft: PeftForwards) -> None:
    for name in ("a", "c"):
        engine.add_request(f"running-{name}", PROMPT, replace(GREEDY, max_tokens=9), adapter=name)
    outputs = engine.step()
    engine.load_adapter("a", folders["b"])
    engine.unload_adapter("c")
    engine.add_request("new", PROMPT, replace(GREEDY, max_tokens=9), adapter="a")
    while engine.has_unfinished():
        outputs += engine.step()
    for request, name in (("running-a", "a"), ("running-c", "c"), ("new", "b")):
        tokens = [token for output in outputs if output.request_id == request for token in output.token_ids]
        assert tokens == answers_of(peft, name, 9), request
    assert engine.adapters.names == ["b", "a"]
    with pytest.raises(ParameterError, match="be the name of a loaded adapter"):
        engine.unload_adapter("c")
    engine.load_adapter("c", folders["c"])
    assert answers(engine, "c", [PROMPT])[0] == answers_of(peft, "c", 6)


def answers_of(peft: PeftForwards, name: str, count: int) -> list[int]:
    """What greedy writes after PROMPT, by peft."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(peft.logits(name, [*PROMPT, *found])[-1].argmax()))
    return found


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_all_ranks(engine: Engine, tmp_path: Path, peft: PeftForwards) -> None:
    engine.add_request("running", PROMPT, GREEDY, adapter="a")
    engine.step()
    wide = save_adapter(tmp_path / "wide", r=40)
    dora = save_adapter(tmp_path / "dora", use_dora=True)
    for folder, field in ((wide, "r"), (dora, "use_dora"), (tmp_path / "none", "adapter")):
        with pytest.raises(ParameterError) as caught:
            engine.load_adapter("x", folder)
        assert caught.value.field == field
    with pytest.raises(ParameterError, match="have at most 128 characters, only letters"):
        engine.load_adapter("a/b", wide)
    low = LowRank(torch.ones(2, 32), torch.ones(64, 2), 1.0)
    packed = engine.adapters.pack(LoraAdapter({"model.layers.0.self_attn.q_proj": low}))
    with pytest.raises(ParameterError, match="be loaded from a folder when tensor_parallel is above 1"):
        engine.adapters.add("x", packed)
    assert engine.adapters.names == ["a", "b", "c"]
    assert finish(engine, "running")[-4:] == answers_of(peft, "a", 6)[-4:]
    with_dora = save_adapter(tmp_path / "rows", use_dora=True, target_modules=["q_proj", "v_proj", "up_proj"])
    engine.load_adapter("rows", with_dora)
    own = PeftForwards(make_model(), {"rows": with_dora})
    assert answers(engine, "rows", [PROMPT])[0] == answers_of(own, "rows", 6)


def test_a_rank_that_cannot_read_an_adapter_refuses_it_for_all(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path], peft: PeftForwards
) -> None:
    """Rank 0 finds an adapter in its working directory, and the follower does not, or finds another."""
    shutil.copytree(folders["a"], tmp_path / "adapter-of-rank-0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=r"every rank can load \(rank 1 refuses it: adapter must be an existing folder"):
        engine.load_adapter("x", "adapter-of-rank-0")
    assert engine.adapters.names == ["a", "b", "c"]
    numbers = [engine.read_adapter(folders[name]) for name in ("b", "c")]  # in a thread of each rank, in the other order
    engine.load_adapter("y", folders["c"], numbers[1])
    engine.load_adapter("x", folders["b"], numbers[0])
    assert [answers(engine, name, [PROMPT])[0] for name in "xy"] == [answers_of(peft, name, 6) for name in "bc"]


def test_an_adapter_that_one_rank_cannot_load_again_fails_on_all(
    engine: Engine, tmp_path: Path, folders: dict[str, Path], peft: PeftForwards
) -> None:
    """Rank 0 has to read it again, and its files have changed. The follower still has it on its host."""
    folder = shutil.copytree(folders["a"], tmp_path / "copy")
    engine.load_adapter("copy", folder)
    engine.adapters._host.clear()
    shutil.copytree(save_adapter(tmp_path / "other", seed=9, r=6), folder, dirs_exist_ok=True)
    engine.add_request("late", PROMPT, GREEDY, adapter="copy")
    engine.add_request("other", PROMPT, GREEDY, adapter="b")
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    [late] = [output for output in outputs if output.request_id == "late"]
    assert late.error is not None
    assert late.error.code == "adapter_failed"
    assert "its files have changed" in late.error.message
    assert [x for output in outputs if output.request_id == "other" for x in output.token_ids] == answers_of(peft, "b", 6)


def test_a_refused_adapter_of_the_settings_ends_the_start(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="with an existing folder"):
        start(llama, lora=[f"x={tmp_path / 'none'}"])


@pytest.mark.slow
@pytest.mark.usefixtures("warm_engine_processes")
def test_a_server_loads_and_unloads_over_ranks(llama: Path, folders: dict[str, Path], peft: PeftForwards) -> None:
    async def main() -> None:
        sizes = {"device": "cpu", "dtype": "float32", "num_pages": 64, "max_model_len": 96, "tensor_parallel": 2}
        engine = AsyncEngine(EngineConfig(model=llama, lora_bytes=1 << 24, **sizes))
        await engine.start()
        running = asyncio.create_task(collect(engine, PROMPT, replace(GREEDY, max_tokens=30)))
        await asyncio.gather(*(engine.load_adapter(name, str(folders[name])) for name in "abc"))
        with pytest.raises(ParameterError, match="be an existing folder"):
            await engine.load_adapter("x", str(folders["a"] / "none"))
        await engine.unload_adapter("b")
        for name in "ac":
            outputs = [output async for output in engine.generate(PROMPT, GREEDY, name, adapter=name)]
            assert [token for output in outputs for token in output.token_ids] == answers_of(peft, name, 6)
        assert engine.adapters == ["a", "c"]
        assert len([token for output in await running for token in output.token_ids]) == 30
        await engine.shutdown()

    asyncio.run(main())


def test_a_slot_of_another_number_is_seen(llama: Path, folders: dict[str, Path]) -> None:
    """The pool of rank 0 gives an adapter another slot than that of the follower."""
    engine = start(llama, lora=[f"a={folders['a']}"])
    engine.adapters.pool._slots.reverse()
    with pytest.raises(EngineDeadError, match="out of step"):
        answers(engine, "a", [PROMPT])
    engine.close()
