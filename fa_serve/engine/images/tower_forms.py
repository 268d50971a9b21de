"""What a layer of a vision tower is given, taken apart into tensors and a form that recurs.

    call = LayerCall.of(names_of(layer), args, kwargs, device)       # raises NoFormError for what has no form
    call.key                                 # equal for calls that one CUDA graph serves
    memory = call.allocate()                 # a tensor of the form's shape for each of `call.tensors`
    call.copy_to(memory[0], 0)
    layer(**call.arguments(memory))
    call.cut(output)                         # without the rows of padding

Towers that read images end to end are given rows of patches, the borders between images or windows (`cu_seqlens`), and the
length of the longest. These have padding:

- rows, up to one of ROWS_PER_OCTAVE sizes for each power of two. They lie behind the last border, where attention reads nothing
  and writes zeros or nothing; everything else in a layer computes each row by itself;
- borders, up to one of BORDERS_PER_OCTAVE sizes: the last one is repeated, which are empty sequences;
- the longest, up to a power of two, because kernels choose tiles by powers of two, and it is only a bound.

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
"""An image of 1,600 patches has 64 rows of padding. Padding is computed, so there are more sizes than of borders."""
BORDERS_PER_OCTAVE = 4
FEWEST_ROWS = 64
_BORDERS = "cu_seqlens"
_LONGEST = "max_seqlen"
_ROTARY = "position_embeddings"
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device)

Tree = tuple[Any, Any]
"""(type, value) of what is no tensor, (Tensor, number) of a tensor, and (type, trees) of what holds others."""


class NoFormError(Exception):
    """Why a call has no form."""


def take_apart(value: Any, tensors: list[Tensor]) -> Tree:
    """What a value is but for its tensors, which are added to a list. Raises NoFormError for types that are not known."""
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
    raise NoFormError(f"a {kind.__name__} is not known")


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
    """The names of the arguments that a layer takes without them, or None for a layer whose arguments have none."""
    kinds = inspect.Parameter
    parameters = inspect.signature(layer.forward).parameters.values()
    if any(each.kind in (kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY) for each in parameters):
        return None
    return tuple(each.name for each in parameters if each.kind is kinds.POSITIONAL_OR_KEYWORD)


def rounded(count: int, per_octave: int) -> int:
    """The next size, of which there are so many between a power of two and the next one."""
    unit = max((1 << max(count - 1, 0).bit_length()) // (2 * per_octave), 1)
    return -(-count // unit) * unit


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one call.

    tree:      what they are but for the tensors, with the longest sequence rounded up
    tensors:   as they were given, the hidden states first
    shapes:    of the form, for each tensor
    borders:   the number of the tensor that has the borders; -1 without padding
    rows:      of the hidden states, of which a form has more; 0 without padding
    constants: the numbers of the tensors that are the same for all layers of a forward
    """

    tree: Tree
    tensors: list[Tensor]
    shapes: tuple[torch.Size, ...]
    borders: int = -1
    rows: int = 0
    constants: frozenset[int] = frozenset()

    @classmethod
    def of(cls, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> LayerCall:
        """names: of arguments that are given without one. Raises NoFormError"""
        if len(args) > len(names):
            raise NoFormError("arguments without names")
        named = dict(zip(names, args, strict=False)) | dict(kwargs)
        tensors: list[Tensor] = []
        first = names[0] if names else ""
        if not isinstance(named.get(first), Tensor):
            raise NoFormError("no hidden states")
        ordered = {name: named[name] for name in (first, *sorted(named.keys() - {first}))}
        tree = take_apart(ordered, tensors)
        if any(x.device != device or x.layout != torch.strided for x in tensors):
            raise NoFormError("a graph does not read numbers of the host")
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
        """What calls have in common that one graph serves."""
        strides = () if self.rows else tuple(x.stride() for x in self.tensors)
        return self.tree, self.shapes, strides, tuple(x.dtype for x in self.tensors)

    def allocate(self) -> list[Tensor]:
        """Memory for each tensor, with numbers of which none is infinite or NaN."""
        pairs = zip(self.tensors, self.shapes, strict=True)
        with torch.inference_mode(False):  # so that it may be written outside of that mode as well
            # a transposed tensor keeps its strides, because what the layer returns may have them
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
        """What a layer returns, without the rows of padding. Raises ValueError for what does not have the rows of the form."""
        if not self.rows:
            return output
        if not output.ndim or len(output) != self.shapes[0][0]:
            raise ValueError("it returns something else than a row for each row")
        return output[: self.rows]


def _constants(named: Mapping[str, Any]) -> list[Any]:
    """What a tower computes once for all its layers."""
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
