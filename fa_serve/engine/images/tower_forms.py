"""The arguments of a layer of a vision tower, taken apart into tensors and a form that recurs.

    call = LayerCall.of(names_of(layer), args, kwargs, device)       # raises NoFormError if they have no form
    call.key                                 # equal for calls that one CUDA graph can serve
    memory = call.allocate()                 # a tensor of the form's shape for each of `call.tensors`
    call.copy_to(memory[0], 0)
    layer(**call.arguments(memory))
    call.cut(output)                         # without the rows of padding

Towers that read images end to end take rows of patches, the borders between images or windows (`cu_seqlens`), and the length of
the longest image or window. All three are padded:

- rows, up to one of ROWS_PER_OCTAVE sizes for each power of two. Rows of padding lie past the last border, where attention
  reads nothing and writes zeros or nothing; everything else in a layer computes each row by itself;
- borders, up to one of BORDERS_PER_OCTAVE sizes: the last border is repeated, which adds empty sequences;
- the length of the longest, up to a power of two. It is only an upper bound, and kernels choose tiles by powers of two.

Left out: graphs (tower_graphs.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.masks import ImplicitMask

ROWS_PER_OCTAVE = 8
"""An image of 1,600 patches has 64 rows of padding. Rows of padding are computed, so rows have more sizes than borders."""
BORDERS_PER_OCTAVE = 4
FEWEST_ROWS = 64
_BORDERS = "cu_seqlens"
_LONGEST = "max_seqlen"
_ROTARY = "position_embeddings"
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)

Tree = tuple[Any, Any]
"""(Tensor, index) for a tensor, (type, trees) for a container, and (type, value) for any other value."""


class NoFormError(Exception):
    """A call has no form, for the reason in the message."""


def take_apart(value: Any, tensors: list[Tensor]) -> Tree:
    """The structure of a value without its tensors, which are appended to `tensors`. Raises NoFormError for unknown types."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, len(tensors) - 1
    if kind in _VALUES:
        return kind, value
    if kind in (tuple, list):
        return kind, tuple(take_apart(each, tensors) for each in value)
    if kind is dict:
        return kind, tuple((name, take_apart(each, tensors)) for name, each in value.items())
    if kind is ImplicitMask:
        return kind, tuple(take_apart(getattr(value, each.name), tensors) for each in fields(value))
    raise NoFormError(f"values of the type {kind.__name__} are not supported")


def put_together(tree: Tree, tensors: Sequence[Tensor]) -> Any:
    """The value that was taken apart, with other tensors."""
    kind, parts = tree
    if kind is Tensor:
        return tensors[parts]
    if kind in _VALUES:
        return parts
    if kind is dict:
        return {name: put_together(each, tensors) for name, each in parts}
    inner = (put_together(each, tensors) for each in parts)
    return ImplicitMask(*inner) if kind is ImplicitMask else kind(inner)


def names_of(layer: nn.Module) -> tuple[str, ...] | None:
    """The names of a layer's positional arguments in order; None if the layer takes positional arguments without names."""
    kinds = inspect.Parameter
    parameters = inspect.signature(layer.forward).parameters.values()
    if any(each.kind in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY) for each in parameters):
        return None
    return tuple(each.name for each in parameters if each.kind is kinds.POSITIONAL_OR_KEYWORD)


def rounded(count: int, per_octave: int) -> int:
    """`count` rounded up to the next size. There are `per_octave` sizes between two powers of two."""
    unit = max((1 << max(count - 1, 0).bit_length()) // (2 * per_octave), 1)
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one call.

    tree:      their structure without the tensors, with the length of the longest sequence rounded up if there is padding
    tensors:   as they were given, the hidden states first
    shapes:    the shape that each tensor has in the form, with padding
    borders:   index of the tensor that holds the borders; -1 without padding
    rows:      rows of the hidden states before padding; 0 without padding
    constants: indices of the tensors that are the same for all layers of a forward
    """

    tree: Tree
    tensors: list[Tensor]
    shapes: tuple[torch.Size, ...]
    borders: int = -1
    rows: int = 0
    constants: frozenset[int] = frozenset()

    @classmethod
    def of(cls, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> LayerCall:
        """names: of the layer's positional arguments. Raises NoFormError if the call has no form"""
        if len(args) > len(names):
            raise NoFormError("the layer has positional arguments without names")
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        tensors: list[Tensor] = []
        first = names[0] if names else ""
        if not isinstance(named.get(first), Tensor):
            raise NoFormError("the layer's first argument is not a tensor of hidden states")
        ordered = {name: named[name] for name in (first, *sorted(named.keys() - {first}))}
        tree = take_apart(ordered, tensors)
        if any(x.device != device or x.layout != torch.strided for x in tensors):
            raise NoFormError("a CUDA graph can read only strided tensors on the model's device")
        constants = frozenset(
            number for number, x in enumerate(tensors) if number and any(x is each for each in _constants(named))
        )
        plain = cls(tree, tensors, tuple(x.shape for x in tensors), constants=constants)
        return _padded(plain, ordered) if _takes_padding(named, tensors) else plain

    def with_hidden(self, hidden: Tensor) -> LayerCall:
        """The same call with other hidden states of the same shape."""
        return LayerCall(self.tree, [hidden, *self.tensors[1:]], self.shapes, self.borders, self.rows, self.constants)

    @property
    def key(self) -> Any:
        """Equal for all calls that one graph can serve."""
        strides = () if self.rows else tuple(x.stride() for x in self.tensors)
        return self.tree, self.shapes, strides, tuple(x.dtype for x in self.tensors)

    def allocate(self) -> list[Tensor]:
        """Memory in the form's shape for each tensor. It holds zeros, so that padding is never infinite or NaN."""
        pairs = zip(self.tensors, self.shapes, strict=True)
        with torch.inference_mode(False):  # so that it may be written outside of inference mode as well
            # a transposed tensor keeps its strides, because the layer's output may have the same strides
            return [torch.zeros_like(x) if x.shape == shape else x.new_zeros(shape) for x, shape in pairs]

    def copy_to(self, memory: Tensor, number: int) -> None:
        """Copy a tensor to memory of the form's shape."""
        given = self.tensors[number]
        if memory.shape == given.shape:
            memory.copy_(given)
            return
        memory[: len(given)].copy_(given)
        if number == self.borders:
            memory[len(given) :].copy_(given[-1:].expand(len(memory) - len(given)))

    def arguments(self, memory: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments by name, with these tensors."""
        given: dict[str, Any] = put_together(self.tree, memory)
        return given

    def cut(self, output: Tensor) -> Tensor:
        """A layer's output without the rows of padding. Raises ValueError if its rows are not those of the form."""
        if not self.rows:
            return output
        if not output.ndim or len(output) != self.shapes[0][0]:
            raise ValueError("it does not return one row per input row")
        return output[: self.rows]


def _constants(named: Mapping[str, Any]) -> list[Any]:
    """The arguments that a tower computes once for all its layers."""
    rotary = named.get(_ROTARY)
    return [named.get(_BORDERS), *(rotary if isinstance(rotary, tuple | list) else (rotary,))]


def _takes_padding(named: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors are rows of patches, borders, and angles for each row, and nothing else."""
    hidden = tensors[0]
    borders = named.get(_BORDERS)
    rotary = named.get(_ROTARY)
    angles = [] if rotary is None else [*rotary] if isinstance(rotary, tuple | list) else [rotary]
    if not isinstance(borders, Tensor) or borders.ndim != 1 or len(borders) < 2 or type(named.get(_LONGEST)) is not int:
        return False
    if hidden.ndim != 2 or not hidden.is_contiguous():
        return False
    if not all(isinstance(x, Tensor) and x.ndim and len(x) == len(hidden) for x in angles):
        return False
    return len(tensors) == 2 + len(angles)


def _padded(call: LayerCall, ordered: Mapping[str, Any]) -> LayerCall:
    hidden = call.tensors[0]
    rows = max(rounded(len(hidden), ROWS_PER_OCTAVE), FEWEST_ROWS)
    number = next(n for n, x in enumerate(call.tensors) if x is ordered[_BORDERS])
    borders = rounded(len(ordered[_BORDERS]) - 1, BORDERS_PER_OCTAVE) + 1
    shapes = tuple(torch.Size((borders,) if n == number else (rows, *x.shape[1:])) for n, x in enumerate(call.tensors))
    longest = min(rounded(ordered[_LONGEST], 1), rows)
    kind, parts = call.tree
    tree = (kind, tuple((name, (int, longest) if name == _LONGEST else each) for name, each in parts))
    return LayerCall(tree, call.tensors, shapes, number, len(hidden), call.constants)
