"""A backend for the attention of diffusers' models, under the name "fa_serve".

    import fa_serve.diffusers
    fa_serve.diffusers.register()
    pipeline.transformer.set_attention_backend("fa_serve")

diffusers sends the attention of its transformers (Flux, Wan, Qwen-Image and others) to the backend that is selected for a model
or for the process. Its list of backends is an Enum, so `register` adds a member. Nothing of diffusers is imported before.

Left out: dropout, context parallelism, and models whose attention does not use diffusers' dispatch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fa_serve import api
from fa_serve.spec import ParameterError, UnsupportedError

NAME = "fa_serve"


def register() -> None:
    """Make `set_attention_backend("fa_serve")` known to diffusers. A repeated call changes nothing.

    Raises UnsupportedError if the installed diffusers has no table of attention backends.
    """
    import diffusers

    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise UnsupportedError(
            f"fa_serve does not support diffusers {diffusers.__version__}: {error}; install diffusers 0.36 or later"
        ) from error
    if NAME in AttentionBackendName._value2member_map_:
        return
    member = str.__new__(AttentionBackendName, NAME)
    member._name_ = NAME.upper()
    member._value_ = NAME
    setattr(AttentionBackendName, member._name_, member)
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    _AttentionBackendRegistry.register(member)(dispatched_attention)


def dispatched_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what diffusers' backend "native" computes. diffusers passes arguments by these names.

    query:      (batch, seqlen_q, num_heads, head_dim)
    key, value: (batch, seqlen_k, num_kv_heads, head_dim)
    attn_mask:  bool (True keeps) or float (added to the scores): (batch, seqlen_k), or up to four dimensions that are
                broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
    is_causal:  aligned to the top left, as in PyTorch: query i sees keys 0 to i
    enable_gqa: has no effect: num_heads may always be a multiple of num_kv_heads
    Returns out (batch, seqlen_q, num_heads, head_dim), or (out, lse) with lse (batch, seqlen_q, num_heads), float32.

    Raises ParameterError for dropout, for context parallelism and for a mask with is_causal, and otherwise what
    `fa_serve.attention` raises.
    """
    if dropout_p:
        raise ParameterError("dropout_p", "be 0, because the kernels have no dropout", dropout_p, "unsupported")
    if _parallel_config is not None:
        raise ParameterError(
            "parallel_config", "be None, because the kernels run on one device", _parallel_config, "unsupported"
        )
    window_size = (-1, -1)
    if is_causal and attn_mask is not None:
        raise ParameterError("attn_mask", "be None with is_causal, as in PyTorch", "a mask", "unsupported")
    if is_causal:  # the last query sees up to key seqlen_q - 1, and the window is counted from the last key
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
        window_size = (-1, query.shape[1] - key.shape[1])
    options: dict[str, Any] = {"softmax_scale": scale, "window_size": window_size, "return_lse": return_lse}
    if attn_mask is not None:
        options["mask"] = _with_four_dimensions(attn_mask, query, key)
    result: Tensor | tuple[Tensor, Tensor] = api.attention(query, key, value, **options)
    if isinstance(result, Tensor):
        return result
    out, lse = result
    return out, lse.transpose(1, 2)


def _with_four_dimensions(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(batch, seqlen_k) hides keys; PyTorch aligns other shapes to (batch, num_heads, seqlen_q, seqlen_k) from the right."""
    if mask.dim() == 2 and mask.shape == (query.shape[0], key.shape[1]):
        return mask[:, None, None, :]
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
