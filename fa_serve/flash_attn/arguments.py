"""What the signatures of FlashAttention-2, -3 and -4 share: the arguments of the softmax, and arguments that are refused.

The functions of `fa_serve.api` take the same options under the same names. This module translates values that flash-attn allows
and fa_serve does not: a window in a list or a tensor, negative numbers for "unlimited" and "off".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from fa_serve.spec import ParameterError

UNLIMITED = (-1, -1)
"""The default of `window_size` in FlashAttention-2 and -3."""

NO_QV = "the kernels compute scores from q and k only"
NO_FLOAT8 = "the kernels support float8 only in a KV cache"


def softmax_arguments(
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | Tensor,
    softcap: float,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    attention_chunk: int = 0,
) -> dict[str, Any]:
    """The options of the softmax as keywords of the functions in `fa_serve.api`.

    window_size:  (left, right), negative numbers are unlimited; softcap: off unless it is positive
    alibi_slopes: (num_heads,) or (batch, num_heads), float32; sinks: (num_heads,)
    attention_chunk: keys per chunk, 0 is off; refused unless the call is causal and has no window on the left
    """
    if window_size is not UNLIMITED:
        left, right = window_size
        window_size = (max(int(left), -1), max(int(right), -1))
    arguments: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap if softcap > 0.0 else 0.0,
    }
    if alibi_slopes is not None:
        arguments["alibi_slopes"] = alibi_slopes
    if sinks is not None:
        arguments["sinks"] = sinks
    if attention_chunk:
        if not causal or window_size[0] >= 0:
            call = f"causal={causal} and window_size={window_size}"
            rule = "be 0 unless causal is True and window_size has no left bound, because no kernel supports both"
            rule += f" (here {call})"
            refuse("attention_chunk", rule, attention_chunk)
        arguments["attention_chunk"] = attention_chunk
    return arguments


def refuse(field: str, rule: str, value: object) -> NoReturn:
    """Raise the error for an argument of flash-attn that fa_serve cannot honour."""
    raise ParameterError(field, rule, value, code="unsupported")


def refuse_dropout(dropout_p: float) -> NoReturn:
    """Raise the error for a probability of dropout that is not 0."""
    rule = "be 0, because the kernels have no dropout; call model.eval() or set the model's dropout to 0"
    refuse("dropout_p", rule, dropout_p)


def refuse_tensor(field: str, why: str, given: Tensor | None) -> None:
    """A tensor that the kernels cannot use must be None."""
    if given is not None:
        refuse(field, f"be None, because {why}", tuple(given.shape))


def refuse_float8(q: Tensor) -> None:
    """Queries must be wider than float8."""
    if q.is_floating_point() and q.dtype.itemsize == 1:
        refuse("q", f"not be float8, because {NO_FLOAT8}", q.dtype)


def host_integer(length: Any) -> int:
    """A maximal length as an int. A tensor on a GPU is read, which waits for the device, as it does in flash-attn."""
    return length if type(length) is int else int(length)
