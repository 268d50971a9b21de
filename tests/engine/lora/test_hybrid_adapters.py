"""Adapters of models that keep states: in attention, mixers and MLPs, with states that no other adapter and no base reads."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_hybrids import model_of, prompts
from hybrids import HYBRIDS
from peft_adapters import PeftForwards, save_adapter
from sampled_cases import each_nth
from tiny_models import VOCAB
from torch import nn
from transformers import PreTrainedModel

from fa_serve.engine import Engine, SamplingParams, StructuredOutput
from fa_serve.engine.speculation import drafts as speculation
from fa_serve.engine.speculation.drafts import NgramDrafter
from fa_serve.hf.lora.product import AdaptedLinear
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.fuse.mixers import DeltaMixer, OwnMixer
from fa_serve.spec import ParameterError

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
LORA = {"lora_bytes": 1 << 26, "max_lora_rank": 16, "max_model_len": 96, "max_num_seqs": 8}
UNADAPTED = {"dt_proj", "kv_b_proj"}
"""Linear layers whose matrices are multiplied otherwise, so that they take no adapters."""
REFUSED_BY_PEFT = {
    "falcon-h1": {"out_proj"},
    "mamba": {"out_proj"},
    "mamba2": {"out_proj"},
    "falcon-mamba": {"out_proj"},
    "nemotron-h": {"out_proj"},
    "zamba2": {"0", "1"},
}
MIXERS = {
    "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "qwen3.5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "granite-hybrid": ["in_proj", "out_proj"],
    "jamba": ["in_proj", "x_proj", "out_proj"],
    "lfm2": ["in_proj", "out_proj"],
}
"""Families of each kind of mixer, and its linear layers."""


@cache
def linear_layers(family: str) -> tuple[str, ...]:
    """The last names of all linear layers of a model that may have adapters."""
    names = {name.rsplit(".")[-1] for name, part in model_of(family).get_decoder().named_modules() if type(part) is nn.Linear}
    return tuple(sorted(names - UNADAPTED - REFUSED_BY_PEFT.get(family, set())))


def fresh(family: str) -> PreTrainedModel:
    """A copy that peft or an engine may change."""
    return copy.deepcopy(model_of(family))


class Adapters:
    """Adapters of a family: a and b in every linear layer, and `mixers` in those of its mixers alone."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        targets = {"a": linear_layers(family), "b": linear_layers(family), "mixers": MIXERS.get(family)}
        self.folders = {
            name: save_adapter(folder / name, model=fresh(family), seed=i, r=4 + i, target_modules=list(layers))
            for i, (name, layers) in enumerate(targets.items())
            if layers is not None
        }
        self.peft = PeftForwards(fresh(family), self.folders)

    def load(self, engine: Engine) -> Engine:
        for name, folder in self.folders.items():
            engine.load_adapter(name, folder)
        return engine

    def wrong(self, names: Sequence[str | None], given: Sequence[list[int]], found: Sequence[list[int]]) -> list[str | None]:
        """The names of answers that are not those of peft."""
        return [
            name
            for name, prompt, tokens in zip(names, given, found, strict=True)
            if tokens != self.peft.choose(name, prompt, tokens)
        ]


@pytest.fixture(scope="module")
def adapters_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapters]:
    return cache(lambda family: Adapters(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def make(make_engine, adapters_of) -> Callable[..., tuple[Engine, Adapters]]:
    def start(family: str, **settings: Any) -> tuple[Engine, Adapters]:
        adapters = adapters_of(family)
        return adapters.load(make_engine(model=fresh(family), **LORA | settings)), adapters

    return start


def answers(engine: Engine, names: Any, given: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [found.token_ids for found in engine.generate(given, params, adapter=names)]


def assert_right(
    engine: Engine, adapters: Adapters, names: Sequence[str | None], given: Sequence[list[int]], params: SamplingParams = GREEDY
) -> None:
    assert adapters.wrong(names, given, answers(engine, names, given, params)) == []
    engine.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("family", each_nth(4, HYBRIDS), ids=lambda family: family.name)
def test_tokens_are_those_of_peft(make, family) -> None:
    """Mixed with others and the base, in chunks; again from the prefix cache; and alone. A sample has most kinds of mixers."""
    engine, adapters = make(family.name, page_size=16, max_num_batched_tokens=27, max_num_seqs=3)
    given = prompts(6)
    names = ["a", "b", None] * 2
    for _ in range(2):
        assert_right(engine, adapters, names, given)
    assert engine.stats().num_states_kept > 0
    alone = [answers(engine, [name], [given[0]])[0] for name in ("a", "b", None)]
    assert adapters.wrong(["a", "b", None], [given[0]] * 3, alone) == []
    assert len({tuple(each) for each in alone}) == 3


@pytest.mark.parametrize("family", MIXERS)
def test_adapters_of_mixers_alone(make, family: str) -> None:
    engine, adapters = make(family)
    given = prompts(4, seed=3)
    assert_right(engine, adapters, ["mixers", None, "a", "mixers"], given)
    assert answers(engine, "mixers", given) != answers(engine, None, given)


@pytest.mark.parametrize("family", ["qwen3-next", "granite-hybrid", "lfm2"])
def test_layers_that_are_not_fused_have_adapters(make, family: str) -> None:
    engine, adapters = make(family, fusion=False)
    assert_right(engine, adapters, ["mixers", None, "a", "b"], prompts(4, seed=4))


def test_which_products_have_a_place(make) -> None:
    """The inputs of a gated delta net are one product; those of other mixers are layers that their own code calls."""
    engine, _ = make("qwen3.5")
    sites = {site.names for site in engine.adapters.memory.sites}
    inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    assert tuple(f"model.layers.0.linear_attn.{name}" for name in inputs) in sites
    assert ("model.layers.0.linear_attn.out_proj",) in sites
    fused = vars(engine._runner.model.model.layers[0])["forward"]
    assert isinstance(fused, FusedLayer)
    assert isinstance(fused.attention, DeltaMixer)
    engine, _ = make("kimi-linear")
    fused = vars(engine._runner.model.model.layers[0])["forward"]
    assert isinstance(fused.attention, OwnMixer)
    assert isinstance(fused.attention.module.b_proj.forward, AdaptedLinear)


def assert_each_finds_its_own(engine: Engine, adapters: Any) -> None:
    """The same prompt with two adapters and without one, twice: at first each begins anew, then where it was itself."""
    [prompt] = prompts(1, seed=5)
    prompt = (prompt * 40)[:37]
    cached = []
    for name in ("a", "b", None, "a", "b", None):
        [found] = engine.generate([prompt], GREEDY, adapter=name)
        assert adapters.wrong([name], [prompt], [found.token_ids]) == []
        cached.append(found.num_cached_tokens)
    assert cached == [0, 0, 0, 36, 36, 36]
    engine.check_integrity()


@pytest.mark.parametrize("family", each_nth(2, [*MIXERS]))
def test_no_state_is_shared_between_adapters(make, family: str) -> None:
    """The same prompt with one after the other: each begins anew, and then where it was itself."""
    engine, adapters = make(family)
    assert_each_finds_its_own(engine, adapters)


def test_an_adapter_of_the_same_name_begins_anew(make) -> None:
    """States of the older adapter are of no use to the newer one; a request that runs keeps the older one."""
    engine, adapters = make("qwen3-next")
    [prompt] = prompts(1, seed=6)
    prompt = (prompt * 40)[:37]
    engine.generate([prompt], GREEDY, adapter="a")
    engine.add_request("running", prompt, GREEDY, adapter="a")
    tokens = [token for output in engine.step() for token in output.token_ids]
    engine.load_adapter("a", adapters.folders["b"])
    while engine.has_unfinished():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert adapters.wrong(["a"], [prompt], [tokens]) == []
    [found] = engine.generate([prompt], GREEDY, adapter="a")
    assert found.num_cached_tokens == 0
    assert adapters.wrong(["b"], [prompt], [found.token_ids]) == []


@pytest.mark.parametrize("family", each_nth(2, [*MIXERS]))
def test_preempted_sequences_that_are_short_of_states(make, family: str) -> None:
    engine, adapters = make(family, num_pages=24, num_states=6, max_num_batched_tokens=23, max_model_len=64)
    engine._steps.depth = 1
    names = ["a", None, "b", "mixers", "a", "b", None, "mixers"]
    assert_right(engine, adapters, names, prompts(8), replace(GREEDY, max_tokens=14))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_states_used == 0


@pytest.mark.parametrize("family", ["qwen3-next", "granite-hybrid", "lfm2"])
def test_replayed_steps(make, replays: list[int], family: str) -> None:
    """Through the buffers of CUDA graphs, with padding, with adapters and without."""
    engine, adapters = make(family, max_num_batched_tokens=64, max_num_seqs=5, prefix_caching=False)
    engine._runner.make_graphs()
    given = prompts(5)
    # a and b of qwen3-next have matrices for experts, whose steps have no graphs
    for names in (["a", None, "b", "mixers", "a"], [None] * 5, *[["mixers", None, "mixers", "mixers", None]] * 3):
        assert_right(engine, adapters, names, given)
    shapes = {(shape.lora, shape.kind) for shape in engine._runner._graphs._replays}
    assert shapes == {(lora, kind) for lora in (True, False) for kind in ("nothing", "prompts")}
    assert replays


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3-next", "granite-hybrid", "lfm2"])
def test_drafts_that_are_accepted_and_dropped(make, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Drafts are the right tokens, a third of them replaced by others."""
    names = ["a", "b", None, "mixers"]
    params = replace(GREEDY, max_tokens=14)
    given = prompts(4, seed=1)
    engine, adapters = make(family)
    found = answers(engine, names, given, params)
    right = {tuple(prompt): [*prompt, *tokens] for prompt, tokens in zip(given, found, strict=True)}
    draw = random.Random(3)

    def propose(drafter: NgramDrafter, sequence: Any, count: int) -> list[int]:
        drafts = right[tuple(sequence.request.prompt)][len(sequence.tokens) :][:count]
        return [(token + 1) % VOCAB if draw.random() < 0.33 else token for token in drafts]

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    monkeypatch.setattr(speculation, "MAX_PAUSE", 1)
    engine, _ = make(family, speculative="ngram", num_speculative_tokens=5)
    for _ in range(2):
        assert_right(engine, adapters, names, given, params)
    stats = engine.stats().speculation
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.slow
def test_drafts_of_prompt_lookup(make) -> None:
    """Answers of the base repeat themselves, and one that has to repeat itself has drafts that are right."""
    given = [[5, 6, 7, 8] * 5, [9] * 6, [5, 6, 7, 8] * 4]
    engine, adapters = make("lfm2", speculative="ngram")
    assert_right(engine, adapters, ["a", None, "mixers"], given, replace(GREEDY, max_tokens=64))
    assert engine.stats().speculation.num_drafts > 0
    params = replace(GREEDY, max_tokens=60, structured=StructuredOutput(regex="([ab]c[de]f){12}"))
    found = answers(engine, ["a", "b", "mixers"], given, params)
    plain, _ = make("lfm2")
    assert found == answers(plain, ["a", "b", "mixers"], given, params)
    assert engine.stats().speculation.num_accepted_tokens > 0


VARIANTS = {
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
    "whole weights": {"modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_every_kind_of_adapter(make, tmp_path: Path, family: str, kind: str) -> None:
    engine, adapters = make(family)
    special = save_adapter(tmp_path / "x", model=fresh(family), seed=7, target_modules=MIXERS[family], **VARIANTS[kind])
    engine.load_adapter("special", special)
    peft = PeftForwards(fresh(family), {"special": special})
    given = prompts(4, seed=14)
    found = answers(engine, ["special", "a", None, "special"], given)
    assert adapters.wrong(["a", None], given[1:3], found[1:3]) == []
    for i in (0, 3):
        assert found[i] == peft.choose("special", given[i], found[i])
    assert found[0] != answers(engine, None, given[:1])[0]


def test_several_answers_share_the_state_of_their_prompt(make) -> None:
    engine, adapters = make("lfm2")
    given = prompts(2, seed=2)
    found = engine.generate(given, replace(GREEDY, n=3), adapter=["b", "mixers"])
    names = ["b"] * 3 + ["mixers"] * 3
    assert adapters.wrong(names, [given[0]] * 3 + [given[1]] * 3, [each.token_ids for each in found]) == []


def test_structured_output_is_chosen_by_the_adapter(make) -> None:
    engine, adapters = make("bamba")
    params = replace(GREEDY, max_tokens=16, structured=StructuredOutput(choice=("fox", "dog", "quick", "lazy")))
    [prompt] = prompts(1, seed=7)
    firsts = [engine.tokenizer(text, add_special_tokens=False).input_ids[0] for text in ("fox", "dog", "quick", "lazy")]
    for name, found in zip("ab", engine.generate([prompt] * 2, params, adapter=["a", "b"]), strict=True):
        logits = adapters.peft.logits(name, prompt)[-1]
        assert found.text in ("fox", "dog", "quick", "lazy")
        assert found.token_ids[0] == firsts[int(logits[firsts].argmax())]


@pytest.mark.slow
def test_adapters_that_take_turns_in_a_small_pool(make) -> None:
    """Two pages: one of three adapters is always out."""
    engine, _ = make("qwen3-next")
    two = 2 * engine.adapters.memory.bytes_per_page
    engine, adapters = make("qwen3-next", lora_bytes=two)
    assert engine.adapters.pool.num_pages == 2
    names = ["a", "b", "mixers", None] * 3
    for _ in range(2):
        assert_right(engine, adapters, names, prompts(12, seed=8))
    assert engine.adapters.pool.num_loads > 3


@pytest.mark.parametrize("family", ["qwen3.5", "kimi-linear", "granite-hybrid"])
def test_adapters_answer_after_sleep(make, family: str) -> None:
    """Layers are fused anew, also around mixers whose own code calls layers with adapters."""
    engine, adapters = make(family)
    engine.sleep()
    engine.wake_up()
    assert_right(engine, adapters, ["a", None, "b", "a"], prompts(4, seed=9))


def test_states_on_the_host_are_those_of_their_adapter(make) -> None:
    """Pages and states of one leave the device for those of another, and come back."""
    engine, adapters = make("granite-hybrid", num_pages=24, num_states=6, kv_host_memory=1 << 24, max_num_seqs=2)
    assert_each_finds_its_own(engine, adapters)


@pytest.mark.parametrize(("family", "layer"), [("jamba", "mamba"), ("mamba", "mixer"), ("falcon-mamba", "mixer")])
def test_a_layer_that_is_not_called_takes_no_adapter(make, tmp_path: Path, family: str, layer: str) -> None:
    """The rest of the model does. peft computes nothing with such an adapter, which training leaves at zero: that is served."""
    engine, adapters = make(family)
    base = fresh(family)
    folder = save_adapter(tmp_path / "trained", model=base, target_modules=["in_proj", "dt_proj"])
    with pytest.raises(ParameterError, match=rf"\.0\.{layer}\.dt_proj must have no adapter, because the model's own code"):
        engine.load_adapter("x", folder)
    untrained = PeftForwards(fresh(family), {"x": folder}).model
    for name, weights in untrained.named_parameters():
        if "dt_proj.lora_B" in name:
            weights.data.zero_()
    untrained.save_pretrained(str(tmp_path), selected_adapters=["x"])
    engine.load_adapter("x", tmp_path / "x")
    given = prompts(2, seed=11)
    peft = PeftForwards(fresh(family), {"x": tmp_path / "x"})
    found = answers(engine, ["x", "a"], given)
    assert found[0] == peft.choose("x", given[0], found[0])
    assert adapters.wrong(["a"], given[1:], found[1:]) == []


# Each of these faults must be seen: the tests of tokens are worth nothing if they do not see them.


def shared_prefix(monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: list[int]) -> None:
    """Pages and states are those of the tokens, whatever the adapter."""
    monkeypatch.setattr(engine._scheduler.pages, "_root", lambda salt, adapter: b"")
    answers(engine, None, [prompt])


def exchanged_states(monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: list[int]) -> None:
    """Pages are right, but the states after them are each other's."""
    answers(engine, ["a"], [prompt])
    answers(engine, ["b"], [prompt])
    for tensors in engine._runner.states.values():
        pages = tensors.pages.clone()
        states = [*engine._scheduler.states._item_of.values()]
        for one, other in zip(states, reversed(states), strict=True):
            tensors.pages[one] = pages[other]


def stale_slot(monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: list[int]) -> None:
    memory = engine.adapters.memory
    write = memory.write
    monkeypatch.setattr(memory, "write", lambda packed, slot, pages: write(packed, 0, pages))


def mixer_without_site(monkeypatch: pytest.MonkeyPatch, engine: Engine, prompt: list[int]) -> None:
    layer = engine._runner.model.model.layers[0]
    fused = layer.forward
    layer.forward = replace(fused, attention=replace(fused.attention, inputs=fused.attention.inputs._replace(site=None)))


@pytest.mark.parametrize("fault", [None, shared_prefix, exchanged_states, stale_slot, mixer_without_site])
def test_faults_are_seen(make, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    engine, adapters = make("qwen3.5")
    [prompt] = prompts(1, seed=12)
    prompt = (prompt * 40)[:37]
    if fault is not None:
        fault(monkeypatch, engine, prompt)
    names = ["a", "b", None]
    wrong = adapters.wrong(names, [prompt] * 3, answers(engine, names, [prompt] * 3))
    assert bool(wrong) == (fault is not None)
    assert None not in wrong


def test_logits_are_those_of_peft(make) -> None:
    engine, adapters = make("qwen3.5")
    [prompt] = prompts(1, seed=13)
    [found] = engine.generate([prompt], replace(GREEDY, prompt_logprobs=0), adapter="mixers")
    expected = adapters.peft.logits("mixers", prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
    torch.testing.assert_close(
        torch.tensor([each.logprob for each in found.prompt_logprobs[1:]]), expected, rtol=1e-4, atol=1e-4
    )
