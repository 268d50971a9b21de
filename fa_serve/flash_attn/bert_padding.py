"""Padded batches to packed rows and back, with the names and results of flash-attn's `bert_padding`.

    rows, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden_states, attention_mask)
    hidden_states = pad_input(rows, indices, batch, seqlen)

All functions are differentiable. `unpad_input` reads the longest length from the device, as flash-attn does.
"""

from __future__ import annotations

import torch
from torch import Tensor

Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor: input (rows, ...), indices (n,) -> (n, ...)."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put rows into a tensor of zeros: values (n, ...), indices (n,) -> (first_axis_dim, ...)."""
    result = values.new_zeros(first_axis_dim, *values.shape[1:])
    return result.index_put((indices,), values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Unpadded:
    """Remove padding.

    hidden_states:  (batch, seqlen, ...)
    attention_mask: (batch, seqlen), bool or int, 1 for a token
    unused_mask:    (batch, seqlen), bool or int, 1 for a position that is kept although it holds no token

    Returns the rows (total, ...), their indices in the flattened batch (total,), cu_seqlens (batch + 1,) int32, the greatest
    length as an int, and the number of tokens of each sequence (batch,) int32, without unused positions.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _starts(lengths), int(lengths.max()), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding at the end of rows that hold several sequences each.

    hidden_states:            (batch, seqlen, ...)
    attention_mask_in_length: (batch, seqlen), int: the lengths of the sequences of each row in order, then zeros

    Returns the rows (total, ...), their indices, cu_seqlens of all sequences, and the greatest length as an int.
    """
    position = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    indices = (position < attention_mask_in_length.sum(dim=-1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _starts(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`: rows (total, ...) and their indices -> (batch, seqlen, ...), zeros where there was padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
