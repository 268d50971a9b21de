"""`translate`: each word of transformers finds its place in the record, and one rule says which keys are seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_checks import Causal
from torch import Tensor, nn

from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.hf.adapter.translate import LayerCall, spec_of, translate
from fa_serve.spec import UnsupportedModelError


def call(
    seqlen_q: int = 6, seqlen_k: int = 6, mask: Any = None, module: nn.Module | None = None, batch: int = 1, **words: Any
) -> LayerCall:
    query = torch.zeros(batch, 4, seqlen_q, 16)
    key = torch.zeros(batch, 2, seqlen_k, 16)
    value = torch.zeros(batch, 2, seqlen_k, 8)
    return translate(Causal() if module is None else module, query, key, value, mask, **words)


MASKS = {
    "none": (None, {}, (-1, 0)),
    "none, not causal": (None, {"is_causal": False}, (-1, -1)),
    "none, window": (None, {"sliding_window": 3}, (2, 0)),
    "none, window both ways": (None, {"sliding_window": 3, "is_causal": False}, (2, 2)),
    "implicit": (ImplicitMask((-1, -1)), {}, (-1, -1)),
    "implicit, against the words": (ImplicitMask((4, 0)), {"sliding_window": 3, "is_causal": False}, (4, 0)),
    "bool": (torch.ones(1, 1, 6, 6, dtype=torch.bool), {"sliding_window": 3}, (-1, -1)),
    "float": (torch.zeros(1, 1, 6, 6), {"is_causal": True}, (-1, -1)),
}


@pytest.mark.parametrize(("mask", "words", "window"), MASKS.values(), ids=MASKS)
def test_a_mask_says_everything_and_the_words_are_asked_without_one(
    mask: Tensor | ImplicitMask | None, words: dict[str, Any], window: tuple[int, int]
) -> None:
    assert call(mask=mask, **words).visible_window == window


def test_what_the_layer_asks_for_is_kept_beside_its_mask() -> None:
    """A paged cache applies it instead of the mask."""
    found = call(mask=ImplicitMask((-1, -1)), sliding_window=3)
    assert (found.window_size, found.is_causal) == ((2, 0), True)
    found = call(mask=ImplicitMask((2, 0)), sliding_window=3, is_causal=False)
    assert (found.window_size, found.is_causal) == ((2, 2), False)


def test_a_module_speaks_of_a_sequence_that_attends_to_itself() -> None:
    assert call(4, 4).is_causal
    assert not call(4, 9).is_causal, "its keys come from elsewhere"
    assert call(4, 9, is_causal=True).is_causal, "the word counts"
    assert not call(4, 4, module=nn.Module()).is_causal, "a module without the attribute is not causal"


def test_every_other_word() -> None:
    sinks = torch.zeros(4)
    bias = torch.zeros(1, 4, 6, 6)
    found = call(scaling=0.5, softcap=30.0, s_aux=sinks, position_bias=bias, position_ids=torch.arange(6), deterministic=True)
    assert (found.softmax_scale, found.softcap) == (0.5, 30.0)
    assert found.sinks is sinks
    assert found.position_bias is bias
    assert found.mask is found.cu_seqlens_q is found.cu_seqlens_k is None
    assert found.deterministic
    plain = call()
    assert (plain.softmax_scale, plain.softcap, plain.sinks, plain.position_bias) == (None, 0.0, None, None)
    assert not plain.deterministic


def test_free_room_of_a_static_cache_is_cut_off() -> None:
    found = call(2, 9, mask=ImplicitMask((-1, 0), num_keys=5), position_bias=torch.zeros(1, 4, 2, 9))
    assert found.key.shape == (1, 2, 5, 16)
    assert found.value.shape == (1, 2, 5, 8)
    assert found.position_bias is not None
    assert found.position_bias.shape == (1, 4, 2, 5)


def test_packed_sequences() -> None:
    ends = torch.tensor([0, 2, 6])
    found = call(cu_seq_lens_q=ends, max_length_q=4)
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.dtype == torch.int32
    assert found.cu_seqlens_k is found.cu_seqlens_q, "keys are packed as queries are, unless told otherwise"
    assert (found.max_seqlen_q, found.max_seqlen_k) == (4, 6)
    other = torch.tensor([0, 3, 6])
    found = call(cu_seq_lens_q=ends, cu_seq_lens_k=other, max_length_k=3)
    assert found.cu_seqlens_k is not None
    assert found.cu_seqlens_k.tolist() == [0, 3, 6]
    assert (found.max_seqlen_q, found.max_seqlen_k) == (6, 3)


def test_packed_sequences_of_a_mask_give_way_to_those_of_the_caller() -> None:
    mask = ImplicitMask((-1, 0), cu_seqlens=torch.tensor([0, 1, 6], dtype=torch.int32))
    found = call(mask=mask)
    assert found.cu_seqlens_q is mask.cu_seqlens
    found = call(mask=mask, cu_seq_lens_q=torch.tensor([0, 4, 6]))
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.tolist() == [0, 4, 6]


def test_the_last_queries_of_packed_sequences() -> None:
    """Lengths count all queries, of which only the last four are passed."""
    everything = slice(None)
    mask = ImplicitMask((-1, 0), cu_seqlens=torch.tensor([0, 3, 7, 9], dtype=torch.int32))
    found = call(4, 9, mask=mask[everything, everything, slice(-4, None), everything])
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.tolist() == [0, 0, 2, 4]
    assert found.cu_seqlens_k is mask.cu_seqlens


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 6)])
def test_masks_of_other_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"must have 4 dimensions.*got shape \(1, 6.*from Causal"):
        call(mask=torch.ones(shape, dtype=torch.bool))


def test_packed_sequences_need_a_batch_of_one() -> None:
    with pytest.raises(UnsupportedModelError, match="need a batch of 1 that holds them end to end, got a batch of 2"):
        call(batch=2, cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32))


def test_the_spec_of_a_call() -> None:
    spec = spec_of(call(mask=ImplicitMask((4, 0)), softcap=5.0, s_aux=torch.zeros(4)), "dense")
    assert (spec.layout, spec.device, spec.arch, spec.dtype, spec.kv_dtype) == ("dense", "cpu", 0, torch.float32, torch.float32)
    assert (spec.head_dim, spec.head_dim_v, spec.num_heads, spec.num_kv_heads) == (16, 8, 4, 2)
    assert (spec.window_size, spec.softcap, spec.sinks, spec.mask) == ((4, 0), True, True, None)
    masks = [torch.ones(1, 1, 6, 6, dtype=torch.bool), torch.zeros(1, 1, 6, 6)]
    assert [spec_of(call(mask=mask), "dense").mask for mask in masks] == ["bool", "float"]
    biased = call(mask=masks[0], position_bias=torch.zeros(1, 4, 6, 6))
    assert spec_of(biased, "dense").mask == "float", "a bias makes the mask that a kernel gets a float mask"
