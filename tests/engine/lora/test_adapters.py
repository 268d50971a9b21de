"""Engines with adapters give the tokens of peft's own forward, alone and in mixed batches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import ATTENTION, PeftForwards, assert_bfloat16_logits, save_adapter, write_over
from quantised_copies import copy_of, dequantised, load
from tiny_models import SIZES, make_model, make_tokenizer, random_prompts
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf.surgery.fuse.layer import FusedLayer

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LORA = {"lora_bytes": 1 << 26, "max_lora_rank": 32, "max_num_seqs": 16}
ADAPTERS = {
    "small": {"r": 2},
    "scaled": {"r": 4, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 8}},
    "attention": {"r": 5, "target_modules": ATTENTION, "alpha_pattern": {"k_proj": 20}},
    "two-pages": {"r": 20, "lora_alpha": 10},
}


BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(make_model, "llama"),
    "qwen3": partial(make_model, "qwen3"),
    "gemma3": partial(make_model, "gemma3"),
}


def save_all(folder: Path, base: Callable[[], PreTrainedModel], **options: Any) -> dict[str, Path]:
    """Four adapters. options: of all of them"""
    return {
        name: save_adapter(folder / name, model=base(), seed=seed, **given | options)
        for seed, (name, given) in enumerate(ADAPTERS.items())
    }


def mixed_answers(engine: Engine, names: list[str | None]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the answers to them, which are generated side by side."""
    prompts = [[token % engine.vocab_size for token in prompt] for prompt in random_prompts(len(names), longest=20)]
    return prompts, [found.token_ids for found in engine.generate(prompts, GREEDY, adapter=names)]


def check_alone_and_mixed(engine: Engine, folders: dict[str, Path], base: PreTrainedModel) -> None:
    """16 requests with four adapters and without one give the tokens of peft, each of them alone as well."""
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    names = [*([*folders, None] * 4)[:16]]
    prompts, mixed = mixed_answers(engine, names)
    peft = PeftForwards(base, folders)
    for name, prompt, found in zip(names, prompts, mixed, strict=True):
        assert found == peft.choose(name, prompt, found), name
    alone = [engine.generate([prompts[i]], GREEDY, adapter=names[i])[0].token_ids for i in range(5)]
    assert alone == mixed[:5]
    others = {tuple(engine.generate([prompts[0]], GREEDY, adapter=name)[0].token_ids) for name in names[1:5]}
    assert len(others | {tuple(alone[0])}) == 5
    engine.check_integrity()


@pytest.mark.parametrize("name", BASES)
def test_tokens_are_those_of_peft(make_engine, tmp_path, name) -> None:
    base = BASES[name]
    check_alone_and_mixed(make_engine(model=base(), **LORA), save_all(tmp_path, base), base())


@pytest.mark.slow
def test_layers_and_adapters_are_there_after_each_sleep_of_the_weights(tmp_path) -> None:
    """The weights leave, and layers are fused anew, also where the weights come back to the memory that they had before. The
    thread that loads adapters lives as long as the engine."""
    base = partial(make_model, "llama")
    base().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    engine = Engine(EngineConfig(model=str(tmp_path / "base"), device="cpu", num_pages=128, page_size=4, **LORA))
    folders = save_all(tmp_path, base)
    names = [*folders, None]
    answers: list[list[int]] = []
    for level in (1, 1, 2, 1):
        engine.sleep(level)
        engine.wake_up()
        if level == 2:
            engine.update_weights(base().named_parameters())
        assert all(isinstance(layer.forward, FusedLayer) for layer in engine.model.model.layers)
        if not answers:
            check_alone_and_mixed(engine, folders, base())
            _, answers = mixed_answers(engine, names)
        assert mixed_answers(engine, names)[1] == answers


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"use_dora": True}),
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]}),
        ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    ],
    ids=["dora", "whole", "router", "experts"],
)
def test_an_adapter_may_be_loaded_while_the_weights_have_no_memory(tmp_path, family, options) -> None:
    """Factors of DoRA and adapted routers are computed from the weights when these come back. A request may wait for both."""
    base = partial(make_model, family)
    base().save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "late", family, **options)
    engine = Engine(EngineConfig(model=str(tmp_path / "base"), device="cpu", num_pages=128, page_size=4, **LORA))
    engine.sleep(2)
    engine.load_adapter("late", folder)
    engine.add_request("waiting", [5, 6, 7], GREEDY, adapter="late")
    engine.wake_up()
    engine.update_weights(base().named_parameters())
    tokens: list[int] = []
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == PeftForwards(base(), {"late": folder}).choose("late", [5, 6, 7], tokens)


@pytest.mark.slow
def test_the_attention_of_a_mixture_has_adapters(make_engine, tmp_path) -> None:
    base = partial(make_model, "qwen3-moe")
    check_alone_and_mixed(make_engine(model=base(), **LORA), save_all(tmp_path, base, target_modules=ATTENTION), base())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3-moe", {"target_modules": "all-linear"}),
        ("gpt-oss", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
        # beside parameters, linear layers named by a pattern, and whole weights
        ("gpt-oss", {"target_modules": r".*\.(q|o)_proj", "target_parameters": EXPERTS, "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"], "rank_pattern": {"q_proj.weight": 7}}),
    ],
    ids=["all-linear", "experts", "pattern and head", "weight"],
)
def test_experts_and_other_parameters_have_adapters(make_engine, tmp_path, family, options) -> None:
    """peft takes the names of projections of experts for their stacked parameters, and doubles the rank of gate and up."""
    folders = {
        "experts": save_adapter(tmp_path / "experts", family, **options),
        "attention": save_adapter(tmp_path / "attention", family, seed=1, target_modules=ATTENTION),
    }
    engine = make_engine(family, **LORA)
    for adapter, folder in folders.items():
        engine.load_adapter(adapter, folder)
    peft = PeftForwards(make_model(family), folders)
    prompts = random_prompts(6, longest=12)
    names = ["experts", "attention", None] * 2
    for adapter, prompt, found in zip(names, prompts, engine.generate(prompts, GREEDY, adapter=names), strict=True):
        assert found.token_ids == peft.choose(adapter, prompt, found.token_ids), adapter
    first = [engine.generate([prompts[0]], GREEDY, adapter=name)[0].token_ids for name in ("experts", None)]
    assert first[0] != first[1]


@pytest.mark.parametrize("host_bytes", [1 << 26, 40_000], ids=["on-the-host", "read-again"])
def test_factors_of_dora_follow_the_weights(make_engine, tmp_path, host_bytes: int) -> None:
    """Of the adapter on the device, with a request that goes on, and of those that are loaded after the update."""
    folders = {name: save_adapter(tmp_path / name, seed=seed, r=4 + seed, use_dora=True) for seed, name in enumerate("abc")}
    changed = make_model()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += torch.randn(parameter.shape, generator=draw) * 0.3
    peft = PeftForwards(copy.deepcopy(changed), folders)
    small = LORA | {"max_lora_rank": 16}
    one_page = make_engine(**small).adapters.memory.bytes_per_page
    engine = make_engine(**small | {"lora_bytes": one_page}, lora_host_bytes=host_bytes)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    prompt = list(range(40, 60))
    engine.generate([prompt] * 2, GREEDY, adapter=["b", "a"])
    engine.add_request("running", prompt, GREEDY, adapter="a")
    tokens = [token for output in engine.step() for token in output.token_ids]
    num_old = len(tokens)
    engine.update_weights(changed.named_parameters())
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert 0 < num_old < len(tokens)
    assert tokens[num_old:] == peft.choose("a", prompt, tokens)[num_old:]
    for name in "abcb":
        [found] = engine.generate([prompt], GREEDY, adapter=name)
        assert found.token_ids == peft.choose(name, prompt, found.token_ids), name


@pytest.mark.parametrize(("family", "router"), [("qwen3-moe", "gate"), ("gpt-oss", "router")])
def test_adapters_of_experts_routers_and_heads_stay_when_weights_change_and_move(make_engine, tmp_path, family, router) -> None:
    """A router with an adapter adds it to the weights that it has now. Layers are fused anew around mixtures with adapters."""
    folders = {
        # not "router": peft confuses the name of an adapter with that of a module
        "routing": save_adapter(
            tmp_path / "routing", family, target_modules=["q_proj"], target_parameters=[f"{router}.weight"]
        ),
        "experts": save_adapter(tmp_path / "experts", family, seed=1, target_modules=["v_proj"], target_parameters=EXPERTS),
        "head": save_adapter(tmp_path / "head", family, seed=2, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    }
    changed = make_model(family)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += torch.randn(parameter.shape, generator=draw) * 0.2
    # peft takes only one set of target_parameters for all adapters of a model
    peft = {name: PeftForwards(copy.deepcopy(changed), {name: folder}) for name, folder in folders.items()}
    engine = make_engine(family, **LORA)
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    prompts = random_prompts(4, longest=12)
    names = [*folders, None]
    engine.generate(prompts, GREEDY, adapter=names)
    engine.update_weights(changed.named_parameters())
    for _ in range(2):
        for name, prompt, found in zip(names, prompts, engine.generate(prompts, GREEDY, adapter=names), strict=True):
            assert found.token_ids == peft[name or "head"].choose(name, prompt, found.token_ids), name
        for parameter in engine.model.parameters():
            parameter.data = parameter.data.clone()
        engine.update_weights()
        assert all(isinstance(layer.forward, FusedLayer) for layer in engine.model.model.layers)


def test_layers_that_are_not_fused_have_adapters(make_engine, tmp_path) -> None:
    base = BASES["llama"]
    check_alone_and_mixed(make_engine(model=base(), fusion=False, **LORA), save_all(tmp_path, base), base())


def test_an_int4_base_has_adapters(make_engine, tmp_path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"intermediate_size": 64})).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    copy = copy_of(tmp_path / "base", "gptq", tmp_path, group_size=32)

    def base() -> PreTrainedModel:
        return dequantised(load(copy, dtype="float32"))

    check_alone_and_mixed(make_engine(model=load(copy, dtype="float32"), **LORA), save_all(tmp_path, base), base())


VARIANTS = {
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "embedding": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "head": {"target_modules": [*ATTENTION, "lm_head"]},
    "tying": {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "whole weights": {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize(
    ("family", "name"), [*product(["llama"], VARIANTS), ("gemma3", "embedding"), ("gemma3", "whole weights")]
)
def test_every_kind_of_adapter(make_engine, tmp_path, family, name) -> None:
    """Beside plain adapters and the base. The embedding of gemma3 is scaled."""
    folders = {
        "special": save_adapter(tmp_path / "special", family, r=16, **VARIANTS[name]),
        "plain": save_adapter(tmp_path / "plain", family, seed=1),
    }
    engine = make_engine(family, **LORA)
    for adapter, folder in folders.items():
        engine.load_adapter(adapter, folder)
    peft = PeftForwards(make_model(family), folders)
    prompts = random_prompts(6, longest=12)
    names = ["special", "plain", None] * 2
    for adapter, prompt, found in zip(names, prompts, engine.generate(prompts, GREEDY, adapter=names), strict=True):
        assert found.token_ids == peft.choose(adapter, prompt, found.token_ids), adapter
    logprobs = replace(GREEDY, prompt_logprobs=0)
    [found] = engine.generate([prompts[0]], logprobs, adapter="special")
    expected = peft.logits("special", prompts[0]).log_softmax(-1)[range(len(prompts[0]) - 1), prompts[0][1:]]
    assert [x.logprob for x in found.prompt_logprobs[1:]] == pytest.approx(expected.tolist(), abs=2e-3)


def test_a_tying_of_what_an_adapter_does_not_have_changes_nothing(make_engine, tmp_path) -> None:
    """The head of the model is its embedding, and the adapter has neither: peft warns, and computes as without the setting."""

    def base() -> PreTrainedModel:
        model = make_model("gemma3")
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.get_input_embeddings().weight
        return model

    folders = {
        name: save_adapter(tmp_path / name, model=base(), ensure_weight_tying=name == "tying") for name in ("tying", "plain")
    }
    assert '"ensure_weight_tying": true' in (folders["tying"] / "adapter_config.json").read_text()
    peft = PeftForwards(base(), folders)
    prompt = random_prompts(1, longest=12)[0]
    assert peft.logits("tying", prompt).equal(peft.logits("plain", prompt))
    engine = make_engine(model=base(), **LORA)
    engine.load_adapter("tying", folders["tying"])
    [found] = engine.generate([prompt], GREEDY, adapter="tying")
    assert found.token_ids == peft.choose("plain", prompt, found.token_ids)


def test_bfloat16_by_the_rule_of_two(tmp_path) -> None:
    assert_bfloat16_logits(tmp_path, "cpu", requests=8)


@pytest.mark.parametrize("late", [False, True])
def test_files_that_are_written_over_before_they_are_copied_are_not_served(make_engine, tmp_path, late) -> None:
    """The answer to the load comes before the copy, which may wait behind other adapters that are read."""
    folder = save_adapter(tmp_path / "copy", seed=4, r=6)
    engine = make_engine(**LORA)
    store = engine.adapters
    reading = engine.read_adapter(folder)
    store._readings[reading].result()
    go_on = threading.Event()
    store._reader.submit(go_on.wait, 30)
    engine.load_adapter("copy", folder, reading)
    write_over(folder)
    if late:
        go_on.set()
        store._reader.submit(int).result()
    prompt = list(range(40, 60))
    [found] = engine.generate([prompt], GREEDY, adapter="copy")
    go_on.set()
    assert found.finish_reason == "error"
    assert len(engine.generate([prompt], GREEDY)[0].token_ids) == 6, "others go on"
