"""Proves that the engine's steps are right for a model that computes its attention itself, by comparing them with the model.

    if not steps_are_right(model, layers): ...       # layers: AttentionSpec by layer_idx

Left out: the forward itself (gathered_keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.paged import PagedBatch, paged_output
from fa_serve.spec import AttentionSpec

_PAGE_SIZE = 4
_BLOCK_TABLE = ((2, 0), (1, 3))
_STEPS = ((5, 3), (1, 1))
"""Tokens of each of two sequences in each of two steps: chunks, then single tokens."""
_TOLERANCE = 64
"""The largest allowed difference of logits, in units of the dtype's eps times the largest logit. Random positions, or one token
too many, change logits by thousands of units."""


@torch.no_grad()
def steps_are_right(model: PreTrainedModel, layers: Mapping[int, AttentionSpec]) -> bool:
    """Whether both sequences get the same logits in these steps as each of them gets alone in the model's own forward."""
    device = model.device
    caches = {i: _empty_cache(layer, device) for i, layer in layers.items()}
    vocab = cast(Any, model).get_input_embeddings().num_embeddings
    lengths = [sum(counts) for counts in zip(*_STEPS, strict=True)]
    sequences = [torch.arange(1, 1 + n, device=device) * (7 + n) % vocab for n in lengths]
    alone = [model(input_ids=x[None], use_cache=False).logits[0] for x in sequences]
    starts = [0] * len(sequences)
    for counts in _STEPS:
        spans = [range(start, start + n) for start, n in zip(starts, counts, strict=True)]
        batch = _batch(caches, spans, device)
        places = torch.tensor([place for span in spans for place in span], device=device)
        tokens, expected = (_cut(each, spans) for each in (sequences, alone))
        rows = torch.arange(len(tokens), device=device)
        logits = paged_output(model, tokens, places, batch, rows).logits[0]
        bound = _TOLERANCE * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        if float((logits - expected).abs().max()) > bound:
            return False
        starts = [span.stop for span in spans]
    return True


def _empty_cache(layer: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pages of one layer, filled with NaN, as memory that nothing has been written to may be."""
    pages = len(_BLOCK_TABLE) * len(_BLOCK_TABLE[0])
    shape = (pages, _PAGE_SIZE, layer.num_kv_heads)
    keys, values = (
        torch.full((*shape, n), float("nan"), dtype=layer.kv_dtype, device=device) for n in (layer.head_dim, layer.head_dim_v)
    )
    return keys, values


def _batch(caches: Mapping[int, tuple[Tensor, Tensor]], spans: Sequence[range], device: torch.device) -> PagedBatch:
    """A step that computes these places of each sequence."""
    ends = [span.stop for span in spans]
    slots = [_BLOCK_TABLE[row][x // _PAGE_SIZE] * _PAGE_SIZE + x % _PAGE_SIZE for row, span in enumerate(spans) for x in span]
    borders = [0]
    for span in spans:
        borders.append(borders[-1] + len(span))
    return PagedBatch(
        kv_caches=caches,
        slot_mapping=torch.tensor(slots, device=device),
        block_table=torch.tensor(_BLOCK_TABLE, dtype=torch.int32, device=device),
        seqused_k=torch.tensor(ends, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(borders, dtype=torch.int32, device=device),
        max_seqlen_q=max(map(len, spans)),
        max_seqlen_k=max(ends),
    )


def _cut(parts: Sequence[Tensor], spans: Sequence[range]) -> Tensor:
    """These rows of each tensor, end to end."""
    return torch.cat([part[span.start : span.stop] for part, span in zip(parts, spans, strict=True)])
