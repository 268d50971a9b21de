"""What a layer of a tower is given, taken apart and put together, with padding and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fa_serve.engine.images.tower_forms import (
    BORDERS_PER_OCTAVE,
    FEWEST_ROWS,
    ROWS_PER_OCTAVE,
    LayerCall,
    NoFormError,
    names_of,
    put_together,
    rounded,
    take_apart,
)
from fa_serve.hf.adapter.masks import ImplicitMask

CPU = torch.device("cpu")
NAMES = ("hidden_states", "cu_seqlens", "position_embeddings")


def call_of(*args: Any, **words: Any) -> LayerCall:
    return LayerCall.of(NAMES, args, words, CPU)


def packed(ends: list[int], rows: int | None = None, **words: Any) -> dict[str, Any]:
    """What a tower of Qwen's kind gives a layer."""
    rows = ends[-1] if rows is None else rows
    borders = torch.tensor(ends, dtype=torch.int32)
    angles = torch.randn(rows, 4)
    return {
        "hidden_states": torch.randn(rows, 8),
        "cu_seqlens": borders,
        "position_embeddings": (angles.cos(), angles.sin()),
        "max_seqlen": int(borders.diff().max()),
    } | words


def test_values_are_put_together_as_they_were() -> None:
    mask = ImplicitMask((-1, -1), key_mask=torch.ones(1, 1, 1, 4, dtype=torch.bool))
    value = {"a": [torch.ones(2), None, "b", 1.5], "c": (True, {"d": torch.zeros(3)}), "mask": mask}
    tensors: list[Tensor] = []
    tree = take_apart(value, tensors)
    hash(tree)
    assert len(tensors) == 3
    other = [x + 1 for x in tensors]
    found = put_together(tree, other)
    assert found["a"][0] is other[0]
    assert found["a"][1:] == [None, "b", 1.5]
    assert found["c"][0] is True
    assert found["c"][1]["d"] is other[1]
    assert type(found["mask"]) is ImplicitMask
    assert found["mask"].key_mask is other[2]
    assert found["mask"].window_size == (-1, -1)


@pytest.mark.parametrize("value", [object(), {1}, nn.Linear(1, 1), range(3), iter([])], ids=lambda value: type(value).__name__)
def test_what_is_not_known_has_no_form(value: object) -> None:
    with pytest.raises(NoFormError, match=r"values of the type .* are not supported"):
        take_apart([value], [])


def test_equal_numbers_of_other_types_are_other_values() -> None:
    keys = [call_of(torch.ones(2, 3), scale=scale).key for scale in (1, 1.0, True, None)]
    assert len({*keys}) == 4


def test_hidden_states_come_first_and_names_in_any_order() -> None:
    hidden = torch.randn(3, 8)
    borders = torch.tensor([0, 3], dtype=torch.int32)
    by_place = call_of(hidden, borders, None, max_seqlen=3)
    by_name = call_of(max_seqlen=3, position_embeddings=None, cu_seqlens=borders, hidden_states=hidden)
    assert by_place.key == by_name.key
    assert by_name.tensors[0] is hidden
    for args in ((), (None,), (hidden, borders, None, 1)):
        with pytest.raises(NoFormError):
            call_of(*args)
    with pytest.raises(NoFormError, match="only strided tensors on the model's device"):
        LayerCall.of(NAMES, (hidden,), {}, torch.device("cuda"))


def test_names() -> None:
    class Named(nn.Module):
        def forward(self, hidden_states: Tensor, mask: Any = None, *, scale: float = 1.0, **words: Any) -> Tensor:
            return hidden_states

    class Unnamed(nn.Module):
        def forward(self, *args: Any) -> None: ...

    assert names_of(Named()) == ("hidden_states", "mask")
    assert names_of(Unnamed()) is None


def test_sizes() -> None:
    assert [rounded(n, 8) for n in (1, 7, 16, 17, 100, 1024, 1025, 1600, 16384)] == [1, 7, 16, 18, 104, 1024, 1152, 1664, 16384]
    assert [rounded(n, 1) for n in (1, 2, 3, 33, 64, 1600)] == [1, 2, 4, 64, 64, 2048]
    for per_octave in (1, BORDERS_PER_OCTAVE, ROWS_PER_OCTAVE):
        sizes = [rounded(n, per_octave) for n in range(1, 3000)]
        assert all(n <= size <= n * (1 + 1 / per_octave) for n, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes)
        assert len({*sizes} & {*range(1025, 2049)}) == per_octave


def test_packed_images_of_many_sizes_have_few_forms() -> None:
    forms = {call_of(**packed([*range(0, 4 * count, 4), 4 * count])).key for count in range(257, 513)}
    assert len(forms) <= 2 * ROWS_PER_OCTAVE


def test_padding() -> None:
    words = packed([0, 40, 70])
    call = call_of(**words)
    assert call.rows == 70
    memory = call.allocate()
    assert [tuple(x.shape) for x in memory] == [(72, 8), (3,), (72, 4), (72, 4)]
    more = call_of(**packed([0, 20, 40, 60, 70]) | {"max_seqlen": 40})
    assert more.shapes[1] == (5,)
    for number in range(4):
        memory[number].fill_(9)
        call.copy_to(memory[number], number)
    arguments = call.arguments(memory)
    assert arguments["max_seqlen"] == 64
    assert torch.equal(arguments["hidden_states"][:70], words["hidden_states"])
    assert torch.equal(arguments["cu_seqlens"], words["cu_seqlens"])
    assert call.cut(memory[0]).shape == (70, 8)
    with pytest.raises(ValueError, match="does not return one row per input row"):
        call.cut(torch.ones(70, 8))
    five = call_of(**packed([0, 10, 20, 30, 40, 50, 60, 64, 66, 70]))
    memory = five.allocate()
    five.copy_to(memory[1], 1)
    assert memory[1].tolist() == [0, 10, 20, 30, 40, 50, 60, 64, 66, 70, 70]
    assert call_of(**packed([0, 4])).shapes[0][0] == FEWEST_ROWS
    assert call.constants == {1, 2, 3}


def test_padded_and_whole_calls_of_one_shape_are_of_one_form() -> None:
    """A picture that needs no padding meets the graphs of those that do."""
    whole = call_of(**packed([0, 40, 72]))
    assert whole.key == call_of(**packed([0, 40, 70])).key
    assert whole.rows == 72


@pytest.mark.parametrize(
    "change",
    [
        {"max_seqlen": None},
        {"hidden_states": torch.randn(1, 10, 8)},
        {"hidden_states": torch.randn(8, 10).T},
        {"position_embeddings": (torch.randn(1, 10, 4),)},
        {"bias": torch.randn(10)},
        {"cu_seqlens": None},
    ],
    ids=["no longest", "batch", "transposed", "angles", "another tensor", "no borders"],
)
def test_what_is_not_padded(change: dict[str, Any]) -> None:
    call = call_of(**packed([0, 4, 10]) | change)
    assert call.rows == 0
    assert [x.shape for x in call.allocate()] == [x.shape for x in call.tensors]
    assert [x.stride() for x in call.allocate()] == [x.stride() for x in call.tensors]
    assert call.cut(torch.ones(3)).shape == (3,)


def test_memory_may_be_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        memory = [*call_of(**packed([0, 4])).allocate(), *call_of(torch.ones(2, 3)).allocate()]
    assert not any(x.is_inference() for x in memory)


def test_other_hidden_states() -> None:
    call = call_of(**packed([0, 4, 10]))
    other = torch.randn(10, 8)
    again = call.with_hidden(other)
    assert again.tensors[0] is other
    assert again.key == call.key
    assert (again.rows, again.borders, again.constants) == (call.rows, call.borders, call.constants)
