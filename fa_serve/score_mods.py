"""Translates FlexAttention's score_mod(score, b, h, q_idx, kv_idx) into options of a call that kernels compute.

    options = translate_score_mod(score_mod, CallSizes(...), causal=True)
    options.factor, options.softcap, options.alibi_slopes, options.mask

The function is called with a `Score` instead of the score, which records the operations on it, and with indices of
`torch.vmap`. So PyTorch computes whatever depends only on the indices, and only operations on the score must be known:

    score * number, score / number        factor, which belongs to softmax_scale and is positive like it
    c * torch.tanh(score / c)             softcap
    score + f(b, h, q_idx, kv_idx)        alibi_slopes if the bias is -slope * distance; otherwise mask, a float mask
    torch.where(condition, score, -inf)   mask

Left out: everything else, such as a factor that depends on the head. It is refused. A float mask takes memory for all queries
and keys, and this for each head (or sequence) if the bias depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.block_lists import BlockLists, CallSizes, version_of
from fa_serve.index_functions import dims_read, name_of, over_grid, what_is_read
from fa_serve.kept_values import StreamValues, is_capturing
from fa_serve.spec import ParameterError, UnsupportedError

_EVALUATED_ELEMENTS = 1 << 22
"""Elements of a bias that are evaluated at once, in whole rows of blocks."""
_ROWS = 128
_ALIBI_ERROR = 1e-6
"""Relative error: a slope is a bias divided by a distance, so slope * distance has two more roundings than the bias."""
_RULE = (
    "may multiply its score by a positive number, cap it with c * torch.tanh(score / c), and add a bias or hide keys "
    "depending only on the indices"
)
_REMEDY = "compute the call with torch.nn.attention.flex_attention"
_NO_CAPTURE = (
    "be evaluated before a CUDA graph captures the call, because a capture cannot wait for its bias: make the same call once "
    "before the capture, or pass the equivalent softcap, alibi_slopes or mask"
)


class ScoreOptions(NamedTuple):
    """The options that a score_mod stands for.

    factor:       factor of the scaled scores
    softcap:      0.0 is off
    alibi_slopes: float32 (heads,) or (batch, heads), or None
    mask:         (1 or batch, 1 or heads, seqlen_q, seqlen_k), or None; bool if the bias only hides keys, else added to scores
    """

    factor: float
    softcap: float
    alibi_slopes: Tensor | None
    mask: Tensor | None


class _Refused(Exception):
    """A score_mod does something that no option stands for. The text says what it does."""


class Score:
    """The score of one query and key on its way through a score_mod.

    It is factor * score + bias, or cap * tanh(factor * score) + bias.

    factor, cap: numbers; cap is None before a tanh
    bias:        a number, or a tensor that depends on indices
    """

    def __init__(self, factor: float = 1.0, cap: float | None = None, bias: Any = 0.0) -> None:
        self.factor = factor
        self.cap = cap
        self.bias = bias

    dtype = torch.float32
    ndim = 0
    requires_grad = False

    @property
    def curve(self) -> tuple[float, float | None]:
        """(factor, cap): the operations on the score before the bias is added."""
        return self.factor, self.cap

    def times(self, number: float) -> Score:
        if self.cap is None:
            return Score(self.factor * number, None, self.bias * number)
        return Score(self.factor, self.cap * number, self.bias * number)

    def plus(self, bias: Any) -> Score:
        if isinstance(bias, Score):
            raise _Refused("adds two values that both depend on its score")
        return Score(self.factor, self.cap, self.bias + bias)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        known = _OPERATIONS.get(getattr(func, "__name__", ""))
        if known is None:
            raise _Refused(f"applies {getattr(func, '__name__', func)} to its score")
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        known = _OPERATIONS.get(name)
        if known is None:
            raise _Refused(f"reads the attribute .{name} of its score")
        return lambda *args, **kwargs: known(self, *args, **kwargs)

    def __add__(self, other: Any) -> Score:
        return _add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Score:
        return _subtract(self, other)

    def __rsub__(self, other: Any) -> Score:
        return _subtract(other, self)

    def __mul__(self, other: Any) -> Score:
        return _multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Score:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Score:
        return _divide(other, self)

    def __neg__(self) -> Score:
        return self.times(-1.0)


_UNKNOWN_OPERATORS = (
    *("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "abs", "getitem"),
    *("pow", "rpow", "mod", "rmod", "floordiv", "rfloordiv", "matmul", "rmatmul"),
)
"""Operators that no option stands for. Python looks them up in the class, and not by `__getattr__`."""


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*operands: Any) -> Any:
        raise _Refused(f"applies {name} to its score")

    return refuse


for _name in _UNKNOWN_OPERATORS:
    setattr(Score, f"__{_name}__", _refusing(_name))


def _number(value: Any, what: str) -> float:
    """A number as a float. It may be a tensor without dimensions, if it depends on no index and needs no gradient."""
    if isinstance(value, Tensor) and not value.dim() and not value.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(value):
            _before_waiting(value.device)
            return float(value)
    elif isinstance(value, int | float):
        return float(value)
    raise _Refused(f"{what} a value that is not a fixed number")


def _before_waiting(device: torch.device) -> None:
    """Raise ParameterError, with a remedy, if waiting for the device would end the capture of a CUDA graph."""
    if is_capturing(device):
        raise ParameterError("score_mod", _NO_CAPTURE, "a first call in the capture")


def _add(first: Any, second: Any, *, alpha: float = 1) -> Score:
    if alpha != 1:
        second = second * alpha
    return first.plus(second) if isinstance(first, Score) else second.plus(first)


def _subtract(first: Any, second: Any, *, alpha: float = 1) -> Score:
    return _add(first, -second if alpha == 1 else second * -alpha)


def _reversed_subtract(first: Any, second: Any) -> Score:
    return _subtract(second, first)


def _multiply(first: Any, second: Any) -> Score:
    score, other = (first, second) if isinstance(first, Score) else (second, first)
    return score.times(_number(other, "multiplies its score by"))


def _divide(first: Any, second: Any) -> Score:
    if not isinstance(first, Score):
        raise _Refused("divides by its score")
    return first.times(1.0 / _number(second, "divides its score by"))


def _negate(score: Score) -> Score:
    return -score


def _tanh(score: Score) -> Score:
    if score.cap is not None or isinstance(score.bias, Tensor) or score.bias:
        raise _Refused("caps its score after it has capped or biased it already")
    return Score(score.factor, 1.0)


def _where(condition: Tensor, shown: Any, other: Any) -> Score:
    if isinstance(shown, Score) and isinstance(other, Score):
        if shown.curve != other.curve:
            raise _Refused("chooses between different factors or caps for its score")
        return Score(*shown.curve, _chosen(condition, shown.bias, other.bias))
    if not isinstance(shown, Score):
        condition, shown, other = ~condition, other, shown
    if not isinstance(shown, Score) or _number(other, "replaces its score with") != float("-inf"):
        raise _Refused("replaces its score with a number other than -inf")
    return Score(*shown.curve, _chosen(condition, shown.bias, float("-inf")))


def _chosen(condition: Tensor, first: Any, second: Any) -> Tensor:
    return torch.where(condition, _on_device(first, condition.device), second)


def _on_device(bias: Any, device: torch.device) -> Tensor:
    """A bias as a tensor. A number is filled in, because a copy to the device would end the capture of a CUDA graph."""
    return bias if isinstance(bias, Tensor) else torch.full((), bias, device=device)


def _masked_fill(score: Score, hidden: Tensor, value: Any) -> Score:
    return _where(hidden, value, score)


def _same(score: Score, *args: Any, **kwargs: Any) -> Score:
    return score


def _filled(score: Score, value: float, **kwargs: Any) -> float:
    return value


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _subtract),
    **dict.fromkeys(("rsub", "__rsub__"), _reversed_subtract),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _multiply),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divide),
    **dict.fromkeys(("neg", "negative", "__neg__"), _negate),
    **dict.fromkeys(("to", "float", "type_as", "clone", "contiguous"), _same),
    "tanh": _tanh,
    "where": _where,
    "masked_fill": _masked_fill,
    "full_like": _filled,
    "zeros_like": lambda score, **kwargs: 0.0,
    "ones_like": lambda score, **kwargs: 1.0,
}
"""By the names of PyTorch's functions and methods."""


def translate_score_mod(
    score_mod: Callable[..., Any], sizes: CallSizes, *, causal: bool, lists: BlockLists | None = None
) -> ScoreOptions:
    """The options that a score_mod stands for in a call. They are kept while the function and the lists live, unless the mask
    needs gradients.

    causal: whether the call hides the keys after the query; lists: the lists of its block_mask. Hidden keys do not matter for
    whether the bias is -slope * distance. Keys that the lists hide are -inf in the mask.
    Raises UnsupportedError, which names the function, for operations that no option stands for, and ParameterError where a bias
    would be evaluated while a CUDA graph captures the call.
    """
    read = what_is_read(score_mod)
    version = () if lists is None else version_of(lists)
    if read is None or version is None:
        return _explained(score_mod, sizes, causal, lists)
    facts, tensors = read
    # The facts describe the function completely, so the lists may own the entry: it is dropped when the lists die, because no
    # later call can have them.
    owner = score_mod if lists is None else lists.kv_num_blocks
    key = (sizes, causal, version, torch.is_grad_enabled(), facts)
    found = _TRANSLATED.find(owner, key, sizes.device) or _TRANSLATED_TO_LARGE.find(owner, key, sizes.device)
    if found is not None:
        return found[0]
    options = _explained(score_mod, sizes, causal, lists)
    mask = options.mask
    if mask is None or not mask.requires_grad:
        kept = _TRANSLATED if mask is None or mask.nbytes <= _LARGE_MASK else _TRANSLATED_TO_LARGE
        kept.keep(owner, key, sizes.device, (options, (*tensors, *(() if lists is None else lists.tensors[1:]))))
    return options


_LARGE_MASK = 32 << 20
"""Bytes. Eight masks of up to this size are kept, and one larger mask."""

_TRANSLATED: StreamValues[tuple[ScoreOptions, tuple[Tensor | None, ...]]] = StreamValues(room=8)
_TRANSLATED_TO_LARGE: StreamValues[tuple[ScoreOptions, tuple[Tensor | None, ...]]] = StreamValues(room=1)
"""The options of functions, and the tensors whose ids are in their keys, except for the tensor that owns the entry."""


def _explained(score_mod: Callable[..., Any], sizes: CallSizes, causal: bool, lists: BlockLists | None) -> ScoreOptions:
    """`_translated`, with the name of the function in errors."""
    try:
        return _translated(score_mod, sizes, causal, lists)
    except _Refused as refusal:
        raise UnsupportedError(f"score_mod {_RULE}, but {name_of(score_mod)} {refusal}: {_REMEDY}") from None


def _translated(score_mod: Callable[..., Any], sizes: CallSizes, causal: bool, lists: BlockLists | None) -> ScoreOptions:
    if 0 in (sizes.batch, sizes.seqlen_q, sizes.seqlen_k):
        return ScoreOptions(1.0, 0.0, None, None)  # there is no score
    scores: list[Score] = []

    @wraps(score_mod)
    def bias_of(*indices: Tensor) -> Tensor:
        score = score_mod(Score(), *indices)
        if not isinstance(score, Score):
            raise _Refused("does not return its score")
        scores[:] = [score]
        return _on_device(score.bias, indices[0].device)

    reads = dims_read(bias_of, sizes.device)
    factor, cap = scores[0].curve
    softcap = 0.0 if cap is None else abs(cap)  # -c * tanh(-s / c) is c * tanh(s / c)
    factor = factor if cap is None else factor * cap  # cap * tanh(factor * s) is the softcap of factor * cap * s
    if not 0 < factor < math.inf:
        raise _Refused(f"multiplies its score by {factor:g}, which is not positive and finite")
    if not isinstance(scores[0].bias, Tensor) and not scores[0].bias:
        return ScoreOptions(factor, softcap, None, None)
    bias = _Bias(over_grid(bias_of), sizes, reads, causal, lists)
    slopes = bias.slopes()
    if slopes is None:
        return ScoreOptions(factor, softcap, None, bias.mask())
    return ScoreOptions(factor, softcap, slopes if slopes.any() else None, None)


class _Bias:
    """The bias of a score_mod over all queries and keys of a call, some rows of blocks at a time."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        sizes: CallSizes,
        reads: tuple[bool, bool],
        causal: bool,
        lists: BlockLists | None,
    ) -> None:
        self._function = function
        self._sizes = sizes
        self._causal = causal
        self._lists = lists
        device = sizes.device
        self._b = torch.arange(sizes.batch if reads[0] else 1, device=device)
        self._h = torch.arange(sizes.heads if reads[1] else 1, device=device)
        self._keys = torch.arange(sizes.seqlen_k, device=device)
        a_row = _ROWS * len(self._b) * len(self._h) * sizes.seqlen_k
        self._step = _ROWS * max(1, _EVALUATED_ELEMENTS // max(1, a_row))

    def _rows(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """-> for some rows from this one on: the bias, which of it is visible, and the distances to the keys in float32."""
        last = min(first + self._step, self._sizes.seqlen_q)
        rows = torch.arange(first, last, device=self._sizes.device)
        bias = self._function(self._b, self._h, rows, self._keys)
        bias = bias if bias.is_floating_point() else bias.float()
        distance = rows[:, None] + (self._sizes.seqlen_k - self._sizes.seqlen_q) - self._keys
        seen = distance >= 0 if self._causal else torch.ones_like(distance, dtype=torch.bool)
        seen = seen[None, None]
        if self._lists is not None:
            seen = seen & self._lists.of_rows(first, last, self._sizes.seqlen_k, self._sizes.heads)
        return bias, seen, distance.abs().float()

    def slopes(self) -> Tensor | None:
        """The slopes of ALiBi, if the bias of all visible keys is -slope * distance; None for any other bias."""
        slopes: Tensor | None = None
        # the last rows have the greatest distances
        for first in reversed(range(0, self._sizes.seqlen_q, self._step)):
            bias, seen, distance = self._rows(first)
            if bias.requires_grad or bias.dtype != torch.float32:
                return None
            _before_waiting(bias.device)
            if slopes is None:
                slopes = _slopes_of(bias, seen, distance)
            if not torch.allclose(torch.where(seen, bias, 0), torch.where(seen, -slopes * distance, 0), _ALIBI_ERROR, 0):
                return None
        if slopes is None:
            return None
        slopes = slopes[..., 0, 0].expand(-1, self._sizes.heads).contiguous()
        return slopes if len(slopes) == self._sizes.batch else slopes[0]

    def mask(self) -> Tensor:
        """The bias as a mask, -inf where a key is hidden by lists. Causality is left to the call."""
        parts = []
        for first in range(0, self._sizes.seqlen_q, self._step):
            bias, seen, _ = self._rows(first)
            parts.append(bias if self._lists is None else torch.where(seen, bias, float("-inf")))
        mask = torch.cat(parts, 2)
        if mask.requires_grad:
            return mask
        _before_waiting(mask.device)
        shown = mask == 0
        return shown if (shown | mask.isneginf()).all() else mask


def _slopes_of(bias: Tensor, seen: Tensor, distance: Tensor) -> Tensor:
    """How much a bias falls per key of distance, (batch, heads, 1, 1), measured at the visible key farthest from its query."""
    shape = (bias + seen + distance).shape
    biases = bias.expand(shape).flatten(2)
    distances = distance.expand(shape).flatten(2)
    farthest = (distances * seen.expand(shape).flatten(2)).argmax(-1, keepdim=True)
    slopes = -biases.gather(2, farthest) / distances.gather(2, farthest).clamp(min=1)
    return slopes[..., None]
