"""What an attention implementation has to get right, as functions of a family, for the CPU and GPU tests of the adapter.

Each check compares fa_serve with transformers' eager attention, strictly: every row of every batch, every valid position,
values and not only tokens. They are functions, so that a test can also show that they fail for an adapter that drops the
padding, a window, a sink and so on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import LENGTH, Family, assert_same, cached, check_pages, here, padding_mask, pair, positions, tokens
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.hf.adapter.models import counts_positions
from fa_serve.hf.adapter.packed_forwards import first_position
from fa_serve.spec import UnsupportedModelError


class Causal(torch.nn.Module):
    """An attention module that says that it is causal."""

    is_causal = True


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | ImplicitMask | None, **words: Any) -> Tensor:
    """`attention_forward` of a causal module, with tensors as `fa_serve.attention` takes them: (batch, seqlen, heads, dim)."""
    out, weights = hf.attention_forward(Causal(), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, **words)
    assert weights is None
    return out


def check_forward(family: Family, kind: str) -> None:
    eager, ours = pair(family)
    mask = padding_mask(kind)
    ids = tokens(*mask.shape)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if family.kind == "decoder":
        inputs["position_ids"] = positions(mask)
    if kind == "none":
        assert_same(ours(ids).logits, eager(ids).logits)
    assert_same(ours(**inputs).logits, eager(**inputs).logits, mask)


LENGTHS = [7, 1, 12, 4]
STARTS = [0, 7, 8, 20, 24]


def ways_of_packing(positions: Tensor) -> dict[str, dict[str, Any]]:
    """What a caller passes beside the tokens of sequences of LENGTHS in one row, by name."""
    starts = torch.tensor(STARTS, dtype=torch.int32)
    lens = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 12, "max_length_k": 12}
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].to(torch.int32)
    at = {"position_ids": positions}
    return {
        "positions": {**at, "use_cache": False},
        "positions, with a cache": {**at, "use_cache": True},
        "lengths": {**lens, "use_cache": False},
        "lengths, with a cache": {**lens, "use_cache": True},
        "both": {**at, **lens, "use_cache": False},
        "both, with a cache": {**at, **lens, "use_cache": True},
        "numbers": {**at, "seq_idx": numbers, "use_cache": False},
        "all": {**at, **lens, "seq_idx": numbers, "use_cache": False},
    }


def is_refused(family: Family, way: str) -> bool:
    """Whether a family refuses a way of packing, because transformers would let its sequences see each other."""
    if way == "positions" or (way == "positions, with a cache" and family.kind == "encoder"):  # which has no cache
        return not family.packs
    return way == "positions, with a cache" or not family.tells_packs


def way_to_pack(family: Family) -> str | None:
    """The plainest way without a cache that a decoder does not refuse; None if it refuses all of them."""
    return next((way for way in ("positions", "both") if not is_refused(family, way)), None)


def separate_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(1, tokens, vocab): logits of sequences of LENGTHS in the row `ids`, each called alone."""
    return torch.cat([model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def restarting_positions(model: PreTrainedModel) -> Tensor:
    """(1, tokens): position_ids of sequences of LENGTHS in one row, as the model counts them."""
    restarting = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return restarting + first_position(model) if counts_positions(type(model)) else restarting


def check_packed(family: Family) -> None:
    """Each way of packing gives the logits of separate sequences, or is refused."""
    eager, ours = pair(family)
    ids = tokens(1, sum(LENGTHS))
    separate = separate_logits(eager, ids)
    for way, words in ways_of_packing(restarting_positions(ours)).items():
        if family.kind == "encoder":
            words.pop("use_cache")
        if is_refused(family, way):
            with pytest.raises(UnsupportedModelError, match="packed sequences"):
                ours(ids, **words)
        else:
            assert_same(ours(ids, **words).logits, separate)
    # nothing stays behind
    assert_same(ours(ids).logits, eager(ids).logits)


def check_decode(family: Family, make_cache: Callable[[Any], Any] = lambda config: DynamicCache(config=config)) -> None:
    """A prompt with padding on the left, then one token at a time."""
    eager, ours = pair(family)
    mask = padding_mask("left")
    ids = tokens(*mask.shape)
    at = positions(mask)
    caches = [DynamicCache(config=eager.config), make_cache(ours.config)]
    for start, end in ((0, 14), *((i, i + 1) for i in range(14, LENGTH))):
        expected, actual = (
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=at[:, start:end],
                **cached(model, cache),
                use_cache=True,
            ).logits
            for model, cache in zip((eager, ours), caches, strict=True)
        )
        assert_same(actual, expected, mask[:, start:end])


def check_chunked_prefill(
    family: Family, make_cache: Callable[[Any], Any] = lambda config: DynamicCache(config=config)
) -> None:
    eager, ours = pair(family)
    ids = tokens(2, LENGTH)
    expected = eager(ids).logits
    cache = make_cache(ours.config)
    for start, end in ((0, 3), (3, 10), (10, 11), (11, LENGTH)):
        at = torch.arange(start, end)[None]
        actual = ours(ids[:, start:end], position_ids=at, **cached(ours, cache), use_cache=True).logits
        assert_same(actual, expected[:, start:end])


def check_custom_mask(family: Family) -> None:
    """A user's mask of 4 dimensions, bool or float, replaces causality and windows."""
    eager, ours = pair(family)
    ids = tokens(2, LENGTH)
    at = torch.arange(LENGTH)[None].expand(2, -1)
    keep = (torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1), device="cpu") < 0.4).to(here())
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    expected = eager(ids, attention_mask=added, position_ids=at, use_cache=False).logits
    for mask in (keep, added):
        assert_same(ours(ids, attention_mask=mask, position_ids=at, use_cache=False).logits, expected)


def check_generate(family: Family, kind: str) -> None:
    eager, ours = pair(family)
    # the first token is sampled at the last position, which must see some key, even in the shortest window
    mask = torch.ones(3, 12, dtype=torch.int64)
    if kind == "left":
        mask[0, :5] = 0
    else:
        mask[1, 9:] = 0
    ids = tokens(*mask.shape).masked_fill(mask == 0, 0)
    options: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 10, "max_new_tokens": 10}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def check_seq2seq(family: Family, kind: str) -> None:
    eager, ours = pair(family)
    mask = padding_mask(kind)
    decoder_mask = padding_mask(kind, 13)
    inputs = {
        "input_ids": tokens(*mask.shape),
        "attention_mask": mask,
        "decoder_input_ids": tokens(*decoder_mask.shape, seed=1),
        "decoder_attention_mask": decoder_mask,
    }
    assert_same(ours(**inputs).logits, eager(**inputs).logits, decoder_mask)


def check_paged(family: Family) -> None:
    eager, _ = pair(family)
    check_pages(fa_serve.patch(copy.deepcopy(eager)), eager)  # in which indexers are patched
