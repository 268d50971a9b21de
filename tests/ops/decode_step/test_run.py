"""Which layers and steps the persistent kernel computes, and the memory that its programs share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_step_cases import StepCase, make_layers, make_step

from fa_serve.ops import Norm
from fa_serve.ops.decode_step import run
from fa_serve.ops.decode_step.kernel import ADDRESSES
from fa_serve.ops.decode_step.layout import PHASE_STRIDE, PHASES
from fa_serve.ops.decode_step.run import DecodeStack
from fa_serve.ops.decode_step.stacked import StackLayer, UnsupportedStackError

CASE = StepCase(head_norms=True)


def changed(layer: StackLayer, change: str) -> StackLayer:
    q_norm = layer.q_norm
    assert q_norm is not None
    changes: dict[str, dict[str, Any]] = {
        "other sizes": {"down": layer.down[:, :-8].contiguous()},
        "other eps": {"before_mlp": layer.before_mlp._replace(eps=1e-3)},
        "strides": {"o": layer.o.T.contiguous().T},
        "dtype": {"gate_up": layer.gate_up.half()},
        "one head norm": {"k_norm": None},
        "norm of all heads": {"q_norm": Norm(torch.ones(64), 1e-5), "k_norm": Norm(torch.ones(64), 1e-5)},
        "other head norms": {"q_norm": q_norm._replace(eps=1e-3)},
    }
    return layer._replace(**changes[change])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("other eps", "two norms differ"),
        ("strides", "o must be contiguous"),
        ("dtype", "gate_up must be"),
        ("one head norm", "queries or keys alone"),
        ("norm of all heads", "those of each head"),
        ("other head norms", "equal but for their weights"),
    ],
)
def test_layers_are_refused_with_a_reason(change: str, reason: str) -> None:
    layers = [changed(layer, change) for layer in make_layers(CASE)]
    with pytest.raises(UnsupportedStackError, match=reason):
        DecodeStack(layers, CASE.options())


def test_layers_that_differ_are_refused() -> None:
    first, second = make_layers(CASE)
    for change in ("other sizes", "other eps"):
        with pytest.raises(UnsupportedStackError, match="differ in more than"):
            DecodeStack([first, changed(second, change)], CASE.options())


def test_float16_is_refused() -> None:
    case = StepCase(dtype=torch.float16)
    with pytest.raises(UnsupportedStackError, match=r"bfloat16 or float32, got torch\.float16"):
        DecodeStack(make_layers(case), case.options())


def test_steps_are_refused_with_a_reason() -> None:
    kernel = DecodeStack(make_layers(CASE), CASE.options())
    _, step = make_step(CASE)
    assert kernel.refusal(step) is None
    assert "1 to 8 tokens, got 9" in str(kernel.refusal(step._replace(slot_mapping=torch.zeros(9, dtype=torch.int64))))
    keys, values = step.caches[0]
    others = {
        "dtype of the weights": (keys.bfloat16(), values.bfloat16()),
        "one layout": (keys, values.transpose(1, 2).contiguous().transpose(1, 2)),
    }
    for reason, pair in others.items():
        assert reason in str(kernel.refusal(step._replace(caches=[pair, *step.caches[1:]])))
    spread = {name: getattr(step, name).repeat(1, 2)[:, ::2] for name in ("cos", "sin")}
    assert "contiguous rows" in str(kernel.refusal(step._replace(**spread)))
    assert "equal strides" in str(kernel.refusal(step._replace(cos=step.cos.repeat(1, 2)[:, :16])))


def test_the_table_has_the_addresses_of_all_layers_and_follows_the_caches() -> None:
    layers = make_layers(CASE)
    kernel = DecodeStack(layers, CASE.options())
    _, step = make_step(CASE)
    table = kernel._table_of(step.caches)
    assert table is kernel._table_of(step.caches)
    assert table.shape == (2, len(ADDRESSES))
    second = dict(zip(ADDRESSES, table[1].tolist(), strict=True))
    assert second["down"] == layers[1].down.data_ptr()
    assert second["v_cache"] == step.caches[1][1].data_ptr()
    assert second["qkv_bias"] == 0
    _, moved = make_step(CASE, seed=2)
    assert kernel._table_of(moved.caches)[0, ADDRESSES.index("k_cache")] == moved.caches[0][0].data_ptr()
    assert kernel._table_of(step.caches) is table, "a graph may have captured it"


def test_tables_of_many_caches_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MOST_TABLES", 2)
    kernel = DecodeStack(make_layers(CASE), CASE.options())
    steps = [make_step(CASE, seed)[1] for seed in range(3)]
    tables = [kernel._table_of(step.caches) for step in steps]
    assert next(iter(kernel._tables.values())) is tables[1]
    assert len(kernel._tables) == 2


@pytest.mark.parametrize("q_lens", [(1,), (1,) * 8, (8,), (2, 5)], ids=str)
def test_a_step_needs_no_memory_that_the_stack_does_not_have(q_lens: tuple[int, ...]) -> None:
    case = StepCase(q_lens=q_lens, kv_lens=[9] * len(q_lens), num_heads=6, num_kv_heads=2)
    kernel = DecodeStack(make_layers(case), case.options(), programs=40)
    _, step = make_step(case)
    parts = kernel.memory()[3]
    _, layout = kernel._launch_for(step)
    assert parts.numel() >= len(q_lens) * case.num_kv_heads * layout.parts_of_unit


def test_counters_have_lines_of_their_own() -> None:
    kernel = DecodeStack(make_layers(CASE), CASE.options(), programs=3)
    *_, counters, pairs, done = kernel.memory()
    assert counters.numel() == PHASES * PHASE_STRIDE
    assert counters.element_size() * PHASE_STRIDE >= 256
    assert pairs.numel() == 8 * CASE.num_kv_heads
    assert done.numel() == 3
