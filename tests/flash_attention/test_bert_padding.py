"""Removing and restoring padding: values, shapes, dtypes and gradients."""

from __future__ import annotations

import torch

from fa_serve.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input, unpad_input_for_concatenated_sequences

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1]])


def test_there_and_back() -> None:
    x = torch.randn(3, 4, 2, 5)
    rows, indices, ends, longest, used = unpad_input(x, MASK)
    assert indices.tolist() == [1, 2, 3, 4, 5, 8, 11]
    assert (ends.tolist(), ends.dtype) == ([0, 3, 5, 7], torch.int32)
    assert (longest, type(longest)) == (3, int)
    assert (used.tolist(), used.dtype) == ([3, 2, 2], torch.int32)
    assert torch.equal(rows, x[MASK.bool()])
    assert torch.equal(pad_input(rows, indices, 3, 4), x * MASK[:, :, None, None])


def test_unused_positions_are_kept_and_not_counted() -> None:
    unused = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    rows, _, ends, longest, used = unpad_input(torch.randn(3, 4), MASK.bool(), unused.bool())
    assert (ends.tolist(), longest, used.tolist(), len(rows)) == ([0, 4, 7, 9], 4, [3, 2, 2], 9)


def test_several_sequences_in_a_row() -> None:
    x = torch.arange(18.0).view(3, 6, 1)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, ends, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert ends.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert torch.equal(indices.float(), rows[:, 0])


def test_gradients() -> None:
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        rows, indices, *_ = unpad_input(x, MASK)
        return pad_input(rows.sin(), indices, 3, 4)

    assert torch.autograd.gradcheck(there_and_back, x)
    assert index_first_axis(x.flatten(0, 1), torch.tensor([3, 3])).shape == (2, 2)
