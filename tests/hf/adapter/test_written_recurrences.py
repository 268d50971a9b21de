"""Forwards that are written here compute what the modules' own code does, and keep states where `generate` looks for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_checks import LENGTHS, ways_of_packing
from hf_families import padding_mask, tokens
from hybrids import BY_NAME, HYBRIDS
from torch import Tensor

import fa_serve
from fa_serve.hf.adapter import written_recurrences
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules, reference_forward, written_for
from fa_serve.hf.adapter.step_cache import StateCall
from fa_serve.hf.adapter.written_recurrences import FORGETS_ALL, written_recurrence
from fa_serve.hf.surgery.states import patch_states
from fa_serve.spec import UnsupportedModelError

WRITTEN = ("minimax", "recurrent-gemma")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    eager = BY_NAME[name].build(**changes)
    return eager, fa_serve.patch(copy.deepcopy(eager))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 5e-5


def test_only_modules_with_inline_recurrences_have_a_written_forward() -> None:
    found = {family.name for family in HYBRIDS for x in find_state_modules(family.build()) if written_for(x) is not None}
    assert found == set(WRITTEN)
    assert written_recurrence({"conv_1d", "rg_lru"}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_modules_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    """MiniMax's own code multiplies by tables of decays, which bfloat16 has rounded. Results are no further from float32."""
    eager = BY_NAME[name].build()
    [module] = find_state_modules(fa_serve.patch(copy.deepcopy(eager).to(dtype)))
    [own] = find_state_modules(eager)
    hidden = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
    words = {"position_ids": torch.arange(20)[None], "attention_mask": None, "use_cache": False, "position_embeddings": None}
    expected = own(hidden, **words)[0]
    assert isinstance(module.forward, PatchedMixer)
    actual, theirs = (forward(hidden.to(dtype), **words)[0] for forward in (module, reference_forward(module)))
    assert actual.dtype == dtype
    error, its = ((x - expected).abs().max() / expected.abs().max() for x in (actual, theirs))
    assert error <= its * 1.2 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["query_decay", "key_decay", "diagonal_decay"])
def test_decays_that_are_not_those_of_the_rates_are_refused(name: str, dtype: torch.dtype) -> None:
    """Those of the keys have no effect on sequences that are shorter than a block, as in the proof."""
    model = BY_NAME["minimax"].build(block_size=256).to(dtype)
    model.set_attn_implementation("fa_serve")
    [module] = find_state_modules(model)
    getattr(module, name).mul_(0.9)
    with pytest.raises(UnsupportedModelError, match=f"MiniMaxLightningAttention: its {name} is not that of its slope_rate"):
        patch_states(model)
    assert "forward" not in vars(module)


def test_decays_that_a_checkpoint_has_rounded() -> None:
    model = BY_NAME["minimax"].build().bfloat16().float()
    [module] = find_state_modules(fa_serve.patch(model))
    assert isinstance(module.forward, PatchedMixer)


def test_decays_are_computed_where_the_model_is() -> None:
    """MiniMax makes positions on the default device, which is not a GPU's where the model is on one."""
    model = BY_NAME["minimax"].build().bfloat16().float()
    model.set_attn_implementation("fa_serve")
    [module] = find_state_modules(model)
    with torch.device("meta"):
        written_recurrences._widen_decays(module)
    exact = module.decay_factors(module.slope_rate)
    for name, table in zip(("query_decay", "key_decay", "diagonal_decay"), exact, strict=True):
        assert torch.equal(getattr(module, name), table)


def test_gates_that_are_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = written_recurrences._gated_inputs
    monkeypatch.setattr(written_recurrences, "_gated_inputs", lambda *args: own(*args[:2], ~args[2]))
    model = BY_NAME["recurrent-gemma"].build()
    model.set_attn_implementation("fa_serve")
    with pytest.raises(UnsupportedModelError, match="RecurrentBlock: the results for whole sequences would change"):
        patch_states(model)


@torch.no_grad()
def test_linear_attention_before_all_attention() -> None:
    """As in MiniMax-Text-01. The cache then counts no tokens, so transformers masks no padding in steps of one token: only a
    forward without a cache gives what a sequence alone gives."""
    eager, ours = pair("minimax", layer_types=["linear_attention", "full_attention"])
    ids = tokens(3, 24)
    answers = [x.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY) for x in (eager, ours)]
    assert torch.equal(*answers)
    mask = padding_mask("left")
    answers = [x.generate(ids, attention_mask=mask, use_cache=False, **GREEDY) for x in (eager, ours)]
    assert torch.equal(*answers)
    eager.set_attn_implementation("sdpa")
    answers = [x.generate(ids, attention_mask=mask, **GREEDY) for x in (eager, ours)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", WRITTEN)
@torch.no_grad()
def test_an_answer_leaves_no_state_to_the_next(name: str) -> None:
    """RecurrentGemma keeps its states in its modules: other batches, packed sequences and forwards without a cache follow."""
    eager, ours = pair(name)
    ids = tokens(3, 24)
    for count, length in ((3, 24), (1, 9), (3, 2), (2, 1)):
        given = ids[:count, :length]
        answers = [x.generate(given, attention_mask=torch.ones_like(given), **GREEDY) for x in (eager, ours)]
        assert torch.equal(*answers)
    packed = tokens(1, sum(LENGTHS))
    alone = torch.cat([eager(part, use_cache=False).logits for part in packed.split(LENGTHS, dim=1)], dim=1)
    ours.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), **GREEDY)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    for way in ("both", "lengths", "positions"):
        assert_near(ours(packed, **ways_of_packing(positions)[way]).logits, alone)
    answers = [x.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY) for x in (eager, ours)]
    assert torch.equal(*answers)


@torch.no_grad()
def test_a_position_of_zero_forgets_what_was_before() -> None:
    """As the padding before a sequence, whose positions `generate` sets to another number."""
    seen: list[StateCall] = []

    def compute(call: StateCall, *unused: Any) -> tuple[Tensor, None]:
        seen.append(call)
        return call.rows["x"], None

    [module] = find_state_modules(BY_NAME["recurrent-gemma"].build())
    hidden = torch.randn(1, 5, 64)
    written_recurrences._recurrent_block(module, hidden, torch.tensor([[1, 1, 0, 1, 2]]), use_cache=False, compute=compute)
    gates = seen[1].rows["log_a"]
    assert (gates[0, 2] == FORGETS_ALL).all()
    assert (gates[0, [0, 1, 3, 4]] > -100).all()
    assert gates.exp()[0, 2].max() == 0


@torch.no_grad()
def test_weights_that_accelerate_moves_are_there_when_they_are_read() -> None:
    accelerate = pytest.importorskip("accelerate")
    eager, ours = pair("recurrent-gemma")
    ids = tokens(1, 12)
    expected = eager(ids, use_cache=False).logits
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    assert ours.model.layers[0].temporal_block.rg_lru.recurrent_param.is_meta
    assert_near(ours(ids, use_cache=False).logits, expected)
