"""Functions of indices: what they read, and how a function that cannot be evaluated is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from fa_serve import index_functions
from fa_serve.index_functions import dims_read, over_blocks, over_grid, what_is_read
from fa_serve.spec import UnsupportedError

BIASES = torch.arange(24.0).view(2, 3, 4)
WIDTH = 3


def of_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return BIASES[0, h, j] + math.pi * i


def of_both(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i > j, BIASES[b][h][j], 0)


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < WIDTH


@pytest.mark.parametrize(("function", "read"), [(of_head, (False, True)), (of_both, (True, True)), (near, (False, False))])
def test_whether_sequences_and_heads_differ(function: Any, read: tuple[bool, bool]) -> None:
    assert dims_read(function, torch.device("cpu")) == read


def test_tensors_are_indexed_one_dimension_after_the_other() -> None:
    """As a scalar function says it: with whole tensors of indices, BIASES[b][h] would be something else."""
    b, h, i, j = (torch.arange(n) for n in (2, 3, 5, 4))
    exact = torch.where(i[:, None] > j, BIASES[:, :, None], 0)
    assert torch.equal(over_grid(of_both)(b, h, i, j), exact)
    some = over_blocks(of_both)(b, b, i.expand(2, -1), j.expand(2, -1))
    assert torch.equal(some, exact[b, b])


def test_what_a_function_reads_is_known_by_identity_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    first = what_is_read(of_head)
    assert first is not None
    assert first[1][0] is BIASES
    assert what_is_read(of_head) == first
    BIASES.add_(0)
    assert what_is_read(of_head) != first
    narrow = what_is_read(near)
    assert narrow == what_is_read(near)
    monkeypatch.setitem(globals(), "WIDTH", 4)
    assert what_is_read(near) != narrow


def test_parts_of_a_function_are_read_too() -> None:
    borders = torch.zeros(2)

    def part(j: Tensor, least: int = 2) -> Tensor:
        return j > borders[0] + least

    functions = (part,)

    def whole(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return functions[0](j)

    before = what_is_read(whole)
    assert before is not None
    borders += 1
    assert what_is_read(whole) != before
    assert index_functions.name_of(whole).endswith("whole")


def test_what_may_change_without_a_trace_is_not_known() -> None:
    limits = [3]

    class Masked:
        limit = 3

        def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j < self.limit

    def of_list(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < limits[0]

    def of_inner(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (lambda x: x < WIDTH)(j)

    class Config:
        width = 3

    def of_class(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < Config.width

    def part(j: Tensor) -> Tensor:
        return j < part.width  # type: ignore[attr-defined]

    part.width = 3  # type: ignore[attr-defined]

    def of_function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return part(j)

    class Number(int):
        width = 3

    number = Number(3)
    noted = torch.ones(4)
    noted.width = 3  # type: ignore[attr-defined]

    def of_number(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < number.width

    def of_noted_tensor(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < noted.width  # type: ignore[attr-defined]

    widths = {0: 3}
    width_of = widths.get
    row_of = torch.ones(4).__getitem__
    layer = torch.nn.Embedding(4, 1)

    def of_method(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < width_of(0)

    def of_tensor_method(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return row_of(j) > 0

    def of_module(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return layer(j) > 0

    with torch.inference_mode():
        unversioned = torch.ones(4)

    def of_inference(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return unversioned[j] > 0

    unknown = (Masked(), of_list, of_inner, of_inference, partial(near, None), of_class, of_function, of_number)
    for function in (*unknown, of_noted_tensor, of_method, of_tensor_method, of_module):
        assert what_is_read(function) is None, function


@pytest.mark.parametrize("combine", [and_masks, or_masks])
def test_what_torch_makes_of_functions_is_read(combine: Any) -> None:
    """Its name is one of torch, but it calls functions that are not."""
    borders = torch.zeros(2)

    def behind(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j > borders[0]

    both = combine(behind, noop_mask)
    first = what_is_read(both)
    assert first is not None
    assert first[1] == [borders]
    borders += 1
    assert what_is_read(both) != first


def test_functions_of_torch_are_always_the_same() -> None:
    gelu = torch.nn.functional.gelu
    dtype = torch.float32

    def of_torch(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return gelu(torch.where(i > j, i, math.floor(2.5)).to(dtype)) > 0

    assert what_is_read(of_torch) is not None
    assert what_is_read(noop_mask) == (id(noop_mask), [])


def test_a_choice_by_python_is_refused() -> None:
    def branches(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i > j if i > 3 else j > 2

    with pytest.raises(UnsupportedError, match=r"branches must be a function that torch\.vmap can evaluate.*torch\.where"):
        dims_read(branches, torch.device("cpu"))
