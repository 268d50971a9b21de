"""The adapter to transformers: attn_implementation="fa_serve", and the paged forward of the engine.

    import fa_serve
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")

transformers asks an implementation for two things. The mask function turns "causal, window 128, this padding" into whatever
the attention function wants to see; the attention function gets q, k, v, that mask and a model's own options. Between ours:

    mask                          meaning
    None                          causal if the module is, sliding window if the module passes one; every key counts
    bool (batch, n)               the same, with padding; only the first n keys count (a static cache hands out all its room)
    bool (0, n)                   the same, without padding
    bool or float, 4-dimensional  the whole truth: neither causality nor a window comes on top

The first three are for the patterns that a kernel knows by itself, so that it can skip what nobody sees. Everything else
(chunks, image blocks, packed sequences, masks of the user's own) is spelled out in four dimensions and honoured as such.

A model is checked when it is loaded, and refused with `UnsupportedModelError` if its attention would not reach us or takes an
option that we do not know. That rests on the model's own eager function: what it names is the model's mathematics, and what
it swallows in **kwargs is not, so we swallow that too.

Left out: attention dropout, attention weights as an output, and caches that do not hold keys and values.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
from fa_serve.spec import AttentionSpec, UnsupportedModelError, arch_of

OLDEST = (5, 17)
try:
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(f"found {transformers.__version__}")
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.masking_utils import (
        AttentionMaskInterface,
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        create_masks_for_generate,
        prepare_padding_mask,
        sdpa_mask,
        sliding_window_bidirectional_overlay,
        sliding_window_overlay,
    )
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    raise ImportError(f"fa_serve's adapter needs transformers >= 5.17 (pip install 'transformers>=5.17'): {error}") from error

NAME = "fa_serve"

# every option that a model's own eager attention may name, all of them handled or refused in `attention_forward`
_KNOWN_OPTIONS = {"module", "query", "key", "value", "query_states", "key_states", "value_states", "attention_mask", "scaling",
                  "dropout", "softcap", "position_bias", "s_aux", "sliding_window", "is_causal", "kwargs"}  # fmt: skip


# --- masks ------------------------------------------------------------------------------------------------------------------

_AND = and_masks(causal_mask_function).__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOW_BOTH_WAYS = sliding_window_bidirectional_overlay(1).__code__


@dataclass(frozen=True)
class MaskKind:
    """A pattern that needs no tensor: causal or not, and a window in transformers' counting or None."""

    causal: bool
    window: int | None = None


def classify(mask_function: Callable[..., Any]) -> MaskKind | None:
    """What transformers asks for, read from the function and its closure; None for anything but the plain patterns."""
    if mask_function is causal_mask_function:
        return MaskKind(causal=True)
    if mask_function is bidirectional_mask_function:
        return MaskKind(causal=False)
    if getattr(mask_function, "__code__", None) is not _AND:
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if len(parts) != 2:
        return None
    overlay, base = parts
    for code, function in ((_WINDOW, causal_mask_function), (_WINDOW_BOTH_WAYS, bidirectional_mask_function)):
        if getattr(overlay, "__code__", None) is code and base is function:
            return MaskKind(base is causal_mask_function, inspect.getclosurevars(overlay).nonlocals["sliding_window"])
    return None


def mask_forward(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = True, config: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask function of `attn_implementation="fa_serve"`: called by transformers once per forward and kind of layer.

    attention_mask: bool (batch, any length) padding or None; q_offset is a tensor when a static cache is being filled
    Returns one of the four forms in this module's docstring.
    """
    # a traced forward gets the mask in full: closures cannot be read there, nor the padding looked at
    kind = None if is_tracing(attention_mask) else classify(mask_function)
    if kind is not None and (allow_is_causal_skip if kind.causal else allow_is_bidirectional_skip):
        keys = _countable_keys(kind, q_length, kv_length, q_offset, kv_offset, config)
        if keys is not None:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is not None:
                padding = padding[:, kv_offset : kv_offset + keys]
                if not padding.all():
                    return padding
            device = kwargs.get("device", "cpu")
            return None if keys == kv_length else torch.empty((0, keys), dtype=torch.bool, device=device)
    mask: Tensor = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip
    return mask


def _countable_keys(
    kind: MaskKind, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int, config: Any
) -> int | None:
    """How many of the first keys are there to be seen, or None when the pattern has to be spelled out."""
    if not kind.causal:
        # our window for such a layer is the module's, and modules disagree on whether its edge is inside
        return kv_length if kind.window is None or kv_length <= kind.window else None
    if isinstance(q_offset, Tensor):
        return None
    # bottom-right alignment: the last query sees up to the last key
    keys = q_offset - kv_offset + q_length
    if not q_length <= keys <= kv_length:
        return None
    if kind.window is not None and keys > kind.window and not _passes_window(type(config)):
        return None
    return keys


# --- attention --------------------------------------------------------------------------------------------------------------


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, max_length_q: int | None = None,
    max_length_k: int | None = None, output_attentions: bool = False, fa_serve_batch: PagedBatch | Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function of `attn_implementation="fa_serve"`.

    query:          (batch, heads, seqlen_q, head_dim); key, value: (batch, kv_heads, seqlen_k, dim), not repeated
    attention_mask: one of the four forms in this module's docstring
    Returns out (batch, seqlen_q, heads, head_dim_v), and None for the weights.
    """
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for attention dropout {dropout}, which fa_serve has not: call model.eval(), or set "
            "the dropout of attention in the model's config to 0"
        )
    if output_attentions:
        raise UnsupportedModelError('fa_serve never forms the attention weights: use attn_implementation="eager" for them')
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if fa_serve_batch is not None:
        if not causal or position_bias is not None:
            raise UnsupportedModelError(f"{type(module).__name__} is not causal self-attention: it cannot run on a paged cache")
        window = -1 if sliding_window is None else sliding_window - 1
        return fa_serve_batch.attend(module, query, key, value, window_size=(window, 0), **options), None
    if attention_mask is not None and attention_mask.dim() == 2:
        n = attention_mask.shape[1]
        key, value = key[:, :, :n], value[:, :, :n]
        position_bias = None if position_bias is None else position_bias[..., :n]
        attention_mask = attention_mask[:, None, None, :] if attention_mask.shape[0] else None
    elif attention_mask is not None:
        causal, sliding_window = False, None
    if sliding_window is not None and key.shape[2] > sliding_window:
        options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seq_lens_q is not None and attention_mask is None and position_bias is None:
        cu_seq_lens_k = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, causal=causal, **options), None
    if position_bias is not None:
        attention_mask = _add_bias(position_bias, attention_mask)
    return attention(q, k, v, causal=causal, mask=attention_mask, **options), None


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_length_q: int | None,
    max_length_k: int | None, **options: Any,
) -> Tensor:  # fmt: skip
    """Sequences end to end in a batch of one, (1, total, heads, dim), as `cu_seq_lens_q` and its companions say."""
    if q.shape[0] != 1:
        raise UnsupportedModelError(f"cu_seq_lens_q describes a batch of 1 packed sequence, got a batch of {q.shape[0]}")
    out = attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=cu_seqlens_q.to(torch.int32), cu_seqlens_k=cu_seqlens_k.to(torch.int32),
        max_seqlen_q=int(max_length_q or q.shape[1]), max_seqlen_k=int(max_length_k or k.shape[1]), **options,
    )  # fmt: skip
    return cast(Tensor, out)[None]


def _add_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One additive mask from a bias and a mask of either kind; both broadcast over batch, heads and queries."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask


# --- paged ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedBatch:
    """What one step of the engine tells every attention layer; tensors on the model's device, shapes as in `fa_serve.api`.

    kv_caches: (k_cache, v_cache) by layer_idx
    """

    kv_caches: Sequence[tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    backend: str = "auto"

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Store this step's keys and values, then attend to the cache: (1, heads, total, dim) -> (1, total, heads, dim)."""
        k_cache, v_cache = self.kv_caches[module.layer_idx]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        store_kv(k, v, k_cache, v_cache, self.slot_mapping, backend=self.backend)
        out = attention_paged(
            q, k_cache, v_cache, block_table=self.block_table, seqused_k=self.seqused_k, cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q, max_seqlen_k=self.max_seqlen_k, backend=self.backend, **options,
        )  # fmt: skip
        return cast(Tensor, out)[None]


def paged_forward(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, batch: PagedBatch, logits_indices: Tensor
) -> Tensor:
    """One forward of a causal model over packed tokens, its keys and values in a paged cache.

    input_ids, position_ids: (total,) int64, packed by batch.cu_seqlens_q; logits_indices: (n,) int64, rows of these
    Returns logits (n, vocab). No mask is built and nothing is read back from the device.
    """
    return _packed_forward(model, input_ids, position_ids, batch, logits_indices)


def _packed_forward(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, batch: PagedBatch | Probe, rows: Tensor
) -> Tensor:
    # a mask of four dimensions goes through transformers untouched, so that it neither builds one nor looks for packing
    no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=input_ids.device)
    output = model(
        input_ids=input_ids[None], position_ids=position_ids[None], attention_mask=no_mask, use_cache=False,
        logits_to_keep=rows, fa_serve_batch=batch,
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


class Probe:
    """Rides in the place of a PagedBatch and writes down what each attention layer asks for; computes nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionSpec] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *, window_size: tuple[int, int],
        softmax_scale: float | None, softcap: float, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        self.layers[module.layer_idx] = AttentionSpec(
            layout="paged", device=query.device.type, arch=arch_of(query.device), dtype=query.dtype, kv_dtype=key.dtype,
            head_dim=query.shape[-1], head_dim_v=value.shape[-1], num_heads=query.shape[1], num_kv_heads=key.shape[1],
            window_size=window_size, softcap=softcap != 0.0, sinks=sinks is not None,
        )  # fmt: skip
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def attention_layers(model_or_config: PreTrainedModel | PreTrainedConfig) -> list[AttentionSpec]:
    """What each attention layer of a causal model needs from the paged attention, found by one forward of a single token.

    A config is tried out on the meta device, without weights. Raises UnsupportedModelError with the reason if the model cannot
    run on a paged cache: its state is not keys and values alone, its masks are more than causality and windows, ...
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _probe(model_or_config)
    config = copy.deepcopy(model_or_config)
    # the other implementations of a mixture of experts look at the router's choice, which the meta device has not
    config._experts_implementation = "batched_mm"
    auto: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return _probe(auto.from_config(config, attn_implementation=NAME))
    except UnsupportedModelError:
        raise
    except ValueError as error:
        raise UnsupportedModelError(f"{type(config).__name__} is no causal language model of transformers: {error}") from error


def check_model(model_or_config: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, with the reason, unless `paged_forward` computes this model right."""
    attention_layers(model_or_config)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> list[AttentionSpec]:
    name, config = type(model).__name__, model.config.get_text_config()
    _check_class(type(model))
    missing = _CALLED_WITH - set(inspect.signature(model.forward).parameters)
    layer_types = getattr(config, "layer_types", None) or ()
    chunked = "chunked_attention" in layer_types or (getattr(config, "attention_chunk_size", None) and not layer_types)
    for refused, reason in (
        (config.is_encoder_decoder, "it is an encoder-decoder, whose cross-attention has no place in a paged cache"),
        (getattr(model, "_is_stateful", False), "it keeps a recurrent state, and a paged cache holds keys and values only"),
        (missing, f"its forward takes no {sorted(missing)}"),
        (chunked, "its attention is chunked, which lives in a mask"),
        (_rope_types(config) & {"dynamic", "longrope"}, "its rotary embedding depends on the longest sequence of the batch"),
    ):
        if refused:
            raise UnsupportedModelError(f"{name} cannot run on a paged cache: {reason}")
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        raise UnsupportedModelError(f"{name} cannot run on a paged cache: it needs {sorted(k.__name__ for k in kinds)}")
    # a sequence longer than any window; the meta device makes its masks for nothing, and we get None wherever that is enough
    long = torch.empty((1, 2**24, 1), dtype=torch.bfloat16, device="meta")
    masks = create_masks_for_generate(config, inputs_embeds=long, attention_mask=None, past_key_values=None)
    for kind, mask in masks.items() if isinstance(masks, dict) else [("causal", masks)]:
        if mask is not None:
            raise UnsupportedModelError(f"{name} cannot run on a paged cache: its {kind} layers need a mask of their own")
    probe, training = Probe(), model.training
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    try:
        _packed_forward(model.train(False), zero, zero, probe, zero)
    finally:
        model.train(training)
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise UnsupportedModelError(
            f"{name} cannot run on a paged cache: of its {config.num_hidden_layers} layers {sorted(probe.layers)} reach it"
        )
    return [probe.layers[i] for i in range(config.num_hidden_layers)]


_CALLED_WITH = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep", "kwargs"}


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a config, which has one set of parameters or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}


# --- which models -----------------------------------------------------------------------------------------------------------

_window_by_option: dict[type, bool] = {}


def _passes_window(config_class: type) -> bool:
    """Whether the attention modules of that config's models pass `sliding_window` on; noted when the model was made."""
    return _window_by_option.get(config_class, False)


def _check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise UnsupportedModelError, with the reason, unless fa_serve computes this model's attention as eager would."""
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{model_class.__name__} computes its attention by itself, not through transformers' AttentionInterface, so "
            'fa_serve cannot take its place: load it with attn_implementation="eager" (or "sdpa"), or, if it is a part of '
            "a larger model, pass a dict that names the parts to be served"
        )
    for name, function in _eager_functions(model_class):
        unknown = [p for p in inspect.signature(function).parameters if p not in _KNOWN_OPTIONS]
        if unknown:
            raise UnsupportedModelError(f"{model_class.__name__}: its {name} takes {unknown}, which fa_serve does not know")


def _eager_functions(model_class: type[PreTrainedModel]) -> list[tuple[str, Callable[..., Any]]]:
    module = sys.modules[model_class.__module__]
    return [(n, f) for n, f in vars(module).items() if n.endswith("eager_attention_forward") and inspect.isfunction(f)]


def _admit(model: PreTrainedModel) -> None:
    """Check a model that is being made, and note whether its window comes as an option or lives in the mask alone."""
    _check_class(type(model))
    calls = re.findall(r"attention_interface\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", _source(type(model)))
    _window_by_option[type(model.config)] = any("sliding_window=" in call for call in calls)


def _source(model_class: type[PreTrainedModel]) -> str:
    try:
        return inspect.getsource(sys.modules[model_class.__module__])
    except (OSError, TypeError):
        return ""


def patch(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded model to fa_serve, in place, and return it.

    Raises UnsupportedModelError, and changes nothing, if a part of the model cannot be served. To serve some parts only, call
    `model.set_attn_implementation({"text_config": "fa_serve"})`.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        _check_class(type(part))
    model.set_attn_implementation(NAME)
    # transformers leaves out parts that have a copy of the whole model's config, such as the two stacks of T5
    for part in parts:
        if part.config._attn_implementation != NAME:
            _admit(part)
            part.config._attn_implementation = NAME
    return model


def register() -> None:
    """Make `attn_implementation="fa_serve"` known to transformers; called once by `import fa_serve`."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)
    original: Any = PreTrainedModel.get_correct_attn_implementation
    if getattr(original, "fa_serve", False):
        return

    # transformers asks this of every model and submodel that it makes or switches; a name it knows it would accept for all
    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested == NAME:
            _admit(self)
        return original(self, requested, *args, **kwargs)

    get_correct_attn_implementation.__dict__["fa_serve"] = True
    setattr(PreTrainedModel, original.__name__, get_correct_attn_implementation)
