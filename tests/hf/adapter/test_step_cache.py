"""What takes the place of a cache in a forward of the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fa_serve import ops
from fa_serve.hf.adapter.step_cache import (
    CONVOLUTION,
    PagedStates,
    StateCall,
    StateKey,
    StateProbe,
    StepCache,
    WholeSequence,
    take_layer_idx,
)
from fa_serve.spec import UnsupportedModelError

KEY = StateKey(2, 0)


def call(rows: int) -> StateCall:
    x = torch.arange(1.0, 1 + 3 * rows).view(1, rows, 3)
    return StateCall(CONVOLUTION, {"x": x}, {"weight": torch.tensor([[1.0, 2.0]] * 3), "bias": None, "activation": None})


def test_a_mixer_is_told_that_there_is_no_previous_state() -> None:
    cache = StepCache(torch.tensor([4, 5, 0]))
    assert not cache.has_previous_state(3)
    assert not cache.has_previous_state(3, state_idx=1)
    assert not cache.layers[3].record_past
    assert (cache.get_conv_state(3, state_idx=0), cache.get_recurrent_state(3, state_idx=0)) == (None, None)
    assert not cache.is_recording_past(3)
    assert cache.get_recurrent_states_to_keep(3) == 0
    assert cache.get_seq_length().tolist() == [4, 4, -2]
    x = torch.zeros(1, 2, 3)
    assert cache.update_conv_state(x, 3, conv_kernel_size=4) is x
    assert cache.update_recurrent_state(x, layer_idx=3) is x


def test_the_layer_of_shared_attention_is_what_its_cache_is_told_last() -> None:
    attention = nn.Module()
    attention.layer_idx = -1  # type: ignore[assignment]
    cache = StepCache(torch.arange(1))
    key = torch.zeros(1, 1, 1, 4)
    assert cache.update(key, key, 5) == (key, key)
    assert take_layer_idx(attention, cache.states) == 5
    assert take_layer_idx(attention, cache.states) == -1
    assert take_layer_idx(attention, None) == -1


def test_a_probe_notes_what_is_kept_and_refuses_a_second_forward_of_a_module() -> None:
    probe = StateProbe()
    assert not probe.compute(KEY, call(1)).any()
    assert probe.found == {KEY: ops.causal_conv1d_state(torch.zeros(1, 1, 3), torch.zeros(3, 2))}
    with pytest.raises(UnsupportedModelError, match="a module computes its states more than once in a forward"):
        probe.compute(KEY, call(1))


def test_a_step_reads_and_writes_the_states_of_its_call() -> None:
    whole = WholeSequence().compute(KEY, call(5))
    tensors = {KEY: ops.causal_conv1d_state(torch.zeros(1, 1, 3), torch.zeros(3, 2)).allocate(4, 1, 2, "cpu")}
    rows = call(5).rows["x"]
    outputs = []
    for first, last, source, target in ((0, 3, -1, 1), (3, 5, 1, 2)):
        batch = ops.StateBatch(
            page_size=2,
            sources=torch.tensor([source], dtype=torch.int32),
            targets=torch.tensor([target], dtype=torch.int32),
            slots=torch.tensor([0]),
            cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32),
            seqused_k=torch.tensor([last], dtype=torch.int32),
            chunks=torch.zeros(0, 4, dtype=torch.int32),
        )
        outputs.append(PagedStates(tensors, batch).compute(KEY, call(5)._replace(rows={"x": rows[:, first:last]})))
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
