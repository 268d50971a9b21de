"""The forward of training, bit for bit what the engine computes: `fa_serve.exact(model)`.

    exact = fa_serve.exact(model)            # once: the context may be entered repeatedly
    with exact:
        logits = model(input_ids=ids, attention_mask=mask).logits      # (batch, tokens, vocab), with gradients
        logprobs = fa_serve.token_logprobs(logits[:, :-1], ids[:, 1:])
    loss(logprobs).backward()                # inside, or outside if no layer is checkpointed

The log-probabilities of a rollout by an engine with `deterministic=True` equal those that the model computes in this context,
in every bit. Decoder layers that the engine fuses run the same fused kernels here, after the same proof, and so do the routers
and shared experts in them. Everything else is the model's own code, with autograd. Below autograd, `DeterministicMode` computes
each operator as it does in the engine: a row of a product, a sum or a function has the same bits in any batch. Three things are
not operators of PyTorch and are replaced here: attention, which runs on a paged cache (`PagedBatch`, as in a step of the
engine), the experts of a mixture, and positions, which count from the first token that is no padding.

Each operator of a fused layer has a backward pass that repeats no product of the forward, so a fused layer keeps about as much
memory for it as the layer's own code does. A layer with a parameter that is an argument of none of these operators is computed
again by its own code in the backward pass (exact_gradients.py). For operators that `DeterministicMode` replaces, the backward
pass is PyTorch's own. So gradients are those of the plain model. With `deterministic_backward` they repeat in every bit.

Left out: dropout, which must be off; caches, which a training forward does not have; page sizes other than the engine's; and
models that `model_layers` refuses. Sources: He et al., "Defeating Nondeterminism in LLM Inference" (2025); batch-invariant
training of vLLM and TorchTitan (2025).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.adapter.packed_forwards import unwatch_packs, watched_modules
from fa_serve.hf.adapter.paged import PagedBatch, first_position
from fa_serve.hf.adapter.probe import model_layers
from fa_serve.hf.adapter.releases import CACHE_NAMES, CHECKPOINTING, forward_within_checkpoint, missing_checkpoint
from fa_serve.hf.adapter.short_choices import length_limit
from fa_serve.hf.adapter.state_modules import find_state_modules
from fa_serve.hf.adapter.translate import LayerCall
from fa_serve.hf.exact_gradients import (
    AttentionWithGradients,
    LayerAgain,
    TrainedCall,
    empty_lse,
    heads_with_gradients,
    layer_computed_again,
    parameters_computed_again,
)
from fa_serve.hf.live_model import (
    Addresses,
    ModelState,
    active_dropout,
    check_live,
    trained_model,
    unwrap_calls,
)
from fa_serve.hf.surgery.experts.mixtures import expert_modules, gate_of, take_experts, weights_of
from fa_serve.hf.surgery.fuse.fusion import fuse_model, unfuse_model
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention, LayerStep, tables_of
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.ops.moe.gradients import experts_with_gradients
from fa_serve.spec import TREE_SPLITS, ParameterError, UnsupportedModelError

EXPERTS_NAME = "fa_serve_exact"
"""The name of the experts implementation in transformers that replaces "fa_serve" within the context."""
GREEDY_TEMPERATURE = 1e-6
"""Below this temperature an engine takes the most likely token, and reports log-probabilities of temperature 1."""


def exact(model: nn.Module, *, page_size: int = 16, deterministic_backward: bool = False, fusion: bool = True) -> ExactForward:
    """A context in which a model computes, with gradients, what an engine with `deterministic=True` computes.

    model:     a causal model of floats, or the PeftModel around one. It may be the model that a `RolloutEngine` runs
    page_size: tokens in a page of the engine's KV cache (`EngineConfig.page_size`)
    deterministic_backward: gradients repeat in every bit as well; slower, because their products are computed row by row
    fusion:    whether the engine fuses layers (`EngineConfig.fusion` without `eager`); fused layers round less often

    In the context, calls take `input_ids` (batch, tokens) or `inputs_embeds` (batch, tokens, hidden), and an `attention_mask`
    (batch, tokens) whose ones are contiguous in each row. Sequences that are packed end to end in a row are told apart by
    `position_ids`. An autocast around the context has no effect inside it.

    Raises UnsupportedModelError for a model that the engine does not run, and for a model whose parameters are not plain
    tensors on one device; ParameterError for a page_size below 1. A call raises ParameterError for arguments that a training
    forward does not have.
    """
    return ExactForward(model, page_size, deterministic_backward, fusion)


class ExactForward:
    """The context of `exact`, which may be entered repeatedly, also within itself."""

    def __init__(self, model: nn.Module, page_size: int, deterministic_backward: bool, fusion: bool) -> None:
        check_live(model)
        if page_size < 1:
            raise ParameterError("page_size", "be a positive integer", page_size)
        self.model = trained_model(model)
        self.page_size = page_size
        self._deterministic_backward = deterministic_backward
        self._fusion = fusion
        self._entered: list[tuple[ModelState, ExitStack, Addresses]] = []
        self._forward = ExitStack()  # what is entered while a forward of the model runs
        self._replace()

    def _replace(self) -> None:
        """Find the state that the model has in the context: implementations of attention and experts, and fused layers."""
        own = ModelState.of(self.model)
        watched = watched_modules(self.model)
        unwrap_calls(self.model)
        try:
            unfuse_model(self.model)
            self.model.train(False)
            self.model.set_attn_implementation(NAME)
            chooses_keys = bool(model_layers(self.model).indexers)
            if find_state_modules(self.model):
                name = type(self.model).__name__
                why = "a rollout rounds states differently in prompts and in steps of single tokens"
                raise UnsupportedModelError(f"{name} keeps states, so it has no exact forward: {why}")
            if chooses_keys or length_limit(self.model) is not None:
                name = type(self.model).__name__
                raise UnsupportedModelError(
                    f"{name} chooses keys, so it has no exact forward: fa_serve does not train the choice"
                )
            if expert_modules(self.model) and not take_experts(self.model):
                raise UnsupportedModelError(f"{type(self.model).__name__} has experts that fa_serve does not compute")
            for module in expert_modules(self.model):
                module.config._experts_implementation = EXPERTS_NAME
            if self._fusion:
                fuse_model(self.model, deterministic=True)
            self._state = ModelState.of(self.model)
        finally:
            own.restore()
            # an exact forward finds packed sequences itself, and outside the context the model does not use fa_serve
            unwatch_packs(watched_modules(self.model) - watched)
        self._addresses = Addresses.of(self.model)
        # valid as long as the addresses are; each forward compares them
        self._again: dict[nn.Module, list[Tensor]] = {}

    def __enter__(self) -> ExactForward:
        if self._fusion and self._addresses != Addresses.of(self.model):
            self._replace()  # merged weights are no longer the memory of the parameters
        own = ModelState.of(self.model)
        self._state.restore(modes=False)
        context = ExitStack()
        context.callback(self.model.register_forward_pre_hook(self._prepare, with_kwargs=True).remove)
        context.callback(self.model.register_forward_hook(self._finish, always_call=True).remove)
        # as in a rollout, which computes in the dtype of the parameters
        context.enter_context(torch.autocast(self.model.device.type, enabled=False))
        context.enter_context(DeterministicMode(backward=self._deterministic_backward))
        for module in self.model.modules():
            if CHECKPOINTING in vars(module):
                context.callback(setattr, module, CHECKPOINTING, getattr(module, CHECKPOINTING))
                setattr(module, CHECKPOINTING, _ExactCheckpoint(module, getattr(module, CHECKPOINTING)))
        self._entered.append((own, context, self._addresses))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        own, context, _ = self._entered.pop()
        context.__exit__(kind, error, traceback)
        own.restore(modes=False)
        if self._entered:
            # the outer context was made for these addresses: if an inner one has found others, the next forward is refused
            self._addresses = self._entered[-1][-1]

    def _prepare(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A hook before the model's forward: it adds the batch that rides along, and positions as the engine counts them."""
        if kwargs.get("fa_serve_batch") is not None:
            return args, kwargs  # a step of an engine, which has its own batch
        if self._fusion and self._addresses != Addresses.of(self.model):
            name = type(self.model).__name__
            raise UnsupportedModelError(f"the parameters of {name} have moved to other memory: enter the exact context again")
        dropout = active_dropout(self.model)
        if dropout is not None:
            rule = (
                f"be 0 in {dropout[0] or type(self.model).__name__}, because rollouts have none: make the model, or its "
                "adapter, with this dropout at 0, or call model.eval(), which also turns gradient checkpointing off"
            )
            raise ParameterError("dropout", rule, dropout[1])
        if torch.is_autocast_enabled(self.model.device.type):
            raise ParameterError("autocast", "be entered around the exact context, not within it", "autocast within it")
        kwargs = {**kwargs}
        if args:
            if len(args) > 1:
                raise ParameterError("args", "hold at most input_ids: pass the other arguments by name", len(args))
            kwargs["input_ids"] = args[0]
        for name in CACHE_NAMES:
            if kwargs.get(name) is not None:
                raise ParameterError(
                    name, "be None in an exact forward, which computes all tokens", type(kwargs[name]).__name__
                )
        inputs = kwargs.get("input_ids")
        embeds = kwargs.get("inputs_embeds")
        tokens = embeds[..., 0] if inputs is None and embeds is not None else inputs
        if tokens is None or tokens.dim() != 2:
            shape = None if tokens is None else tuple(tokens.shape)
            raise ParameterError("input_ids", "be given with the shape (batch, tokens) in an exact forward", shape)
        rows = _Rows.of(tokens, kwargs.get("attention_mask"), kwargs.get("position_ids"), first_position(self.model))
        batch = _ExactBatch(rows, self.page_size, self._deterministic_backward, self._state, self._again)
        # for models whose forward does not pass its arguments on to its layers
        self._forward.enter_context(riding(batch))
        kwargs |= {
            "position_ids": rows.positions,
            # a mask of 4 dimensions, so that transformers passes it on and builds none
            "attention_mask": torch.empty((1, 1, 0, 0), dtype=torch.bool, device=tokens.device),
            "use_cache": False,
            "fa_serve_batch": batch,
        }
        return (), kwargs

    def _finish(self, *_: Any) -> None:
        """A hook behind the model's forward, also one that fails."""
        self._forward.close()


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """The log-probability of each token, as an engine with `logprobs_mode="processed_logprobs"` reports it.

    logits:      (..., vocab), any float dtype; tokens: (...), int64
    temperature: the temperature of the rollout, which has no further filters. Greedy answers (a temperature below 1e-6) have
                 the log-probabilities of temperature 1

    Returns (...) float32. In `fa_serve.exact` it equals the rollout's in every bit. Raises ParameterError for other shapes,
    because some of them would broadcast, and for a temperature below 0.
    """
    if tokens.shape != logits.shape[:-1]:
        rule = f"have the shape of the logits without the vocabulary dimension, {tuple(logits.shape[:-1])}"
        raise ParameterError("tokens", rule, tuple(tokens.shape))
    if not temperature >= 0:
        raise ParameterError("temperature", "be at least 0", temperature)
    scores = logits.float()
    if temperature != 1.0 and temperature >= GREEDY_TEMPERATURE:
        # to divide by a Python number, a GPU multiplies with its reciprocal; the sampler divides by a tensor
        scores = scores / torch.full((), temperature, dtype=torch.float32, device=logits.device)
    return scores.gather(-1, tokens[..., None])[..., 0] - scores.logsumexp(dim=-1)


class _ExactCheckpoint(NamedTuple):
    """The function by which a module checkpoints its layers, within the context. own: the module's function outside of it"""

    module: nn.Module
    own: Callable[..., Any]

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.own(partial(self._compute, layer), *args, **kwargs)

    def _compute(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer, in the forward or again in the backward pass, which needs the implementations of the context."""
        if not isinstance(getattr(self.module, CHECKPOINTING), _ExactCheckpoint):
            raise UnsupportedModelError(
                f"a checkpointed layer of an exact forward ({type(self.module).__name__}) is computed again outside of "
                "fa_serve.exact: call backward() inside of the context, or turn gradient checkpointing off"
            )
        return layer(*args, **kwargs)


class _Rows(NamedTuple):
    """The sequences of a dense batch.

    positions: (batch, tokens) int64
    valid:     (n,) int64, places of the tokens that are no padding, in the flattened batch; None if there is no padding
    starts:    (m + 1,) int64: where each sequence starts among the tokens that are no padding, and their number, on the host
    """

    positions: Tensor
    valid: Tensor | None
    starts: Tensor

    @staticmethod
    def of(tokens: Tensor, mask: Tensor | None, positions: Tensor | None, first_position: int = 0) -> _Rows:
        """Read the sequences from a mask of 2 dimensions and from positions, which start again where a sequence does.

        first_position: of the first token, where the model counts; with None for positions, they count from it
        """
        batch, length = tokens.shape
        if mask is not None and (mask.dim() != 2 or mask.shape != tokens.shape):
            shapes = f"{tuple(mask.shape)} for tokens of {tuple(tokens.shape)}"
            raise ParameterError("attention_mask", "have the shape (batch, tokens) in an exact forward", shapes)
        seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        counted = (seen.cumsum(1) - 1).clamp(min=0)
        if mask is not None and bool((seen[:, 1:] & ~seen[:, :-1]).sum(1).add(seen[:, 0]).gt(1).any()):
            raise ParameterError("attention_mask", "have its ones next to each other in each row", "a row with a gap")
        if not bool(seen.any()):
            raise ParameterError("input_ids", "have at least one token that is no padding", f"a shape of {tuple(tokens.shape)}")
        if positions is None:
            positions = counted + first_position
        positions = positions.expand(batch, length)
        first = seen.clone()
        first[:, 1:] &= ~seen[:, :-1] | (positions[:, 1:] != positions[:, :-1] + 1)
        valid = seen.flatten().nonzero()[:, 0]
        starts = first.flatten()[valid].nonzero()[:, 0].cpu()
        padded = len(valid) < batch * length
        return _Rows(positions, valid if padded else None, torch.cat([starts, torch.tensor([len(valid)])]))

    def pack(self, x: Tensor) -> Tensor:
        """(batch, tokens, ...) -> (n, ...): the tokens that are no padding. Without padding, the memory is shared."""
        flat = x.flatten(0, 1)
        return flat if self.valid is None else flat[self.valid]

    def unpack(self, x: Tensor, padding: Tensor) -> Tensor:
        """The reverse of `pack`. padding: (batch, tokens, ...): the result has its rows at the places of padding"""
        if self.valid is None:
            return x.view_as(padding)
        return padding.flatten(0, 1).index_copy(0, self.valid, x).view_as(padding)

    def paged(self, page_size: int) -> PagedBatch:
        """A batch in which each sequence is a prompt, as a step of an engine in deterministic mode may compute it."""
        device = self.positions.device
        lengths = self.starts.diff()
        pages = -(-lengths // page_size)
        first_page = pages.cumsum(0) - pages
        place = torch.arange(int(lengths.sum())) - self.starts[:-1].repeat_interleave(lengths)
        columns = torch.arange(int(pages.max()))
        # entries past the last page of a sequence are never read
        table = (first_page[:, None] + columns).clamp(max=int(pages.sum()) - 1)
        return PagedBatch(
            kv_caches={},
            slot_mapping=(first_page.repeat_interleave(lengths) * page_size + place).to(device),
            block_table=table.int().to(device),
            seqused_k=lengths.int().to(device),
            cu_seqlens_q=self.starts.int().to(device),
            max_seqlen_q=int(lengths.max()),
            max_seqlen_k=int(lengths.max()),
            num_splits=TREE_SPLITS,
        )


class _ExactBatch:
    """Computes the attention of every layer of a dense batch.

    again: the result of `parameters_computed_again` for each layer, by its module; the first forward fills it for later ones
    """

    def __init__(
        self, rows: _Rows, page_size: int, deterministic: bool, state: ModelState, again: dict[nn.Module, list[Tensor]]
    ) -> None:
        self.rows = rows
        self.state = state
        self.page_size = page_size
        self.batch = rows.paged(page_size)
        self.num_pages = int((-(-rows.starts.diff() // page_size)).sum())
        self.deterministic = deterministic
        self._again = again
        # all layers share these, so that a layer costs the host fewer operators
        self._pages: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self._tables: dict[int, tuple[Any, list[Tensor]]] = {}

    def pages_like(self, name: str, x: Tensor) -> Tensor:
        """Pages for keys or values (n, heads, dim) of all sequences, with the layout of the engine's pages.

        name: "keys" or "values". Layers share these pages, because each layer first writes everything that it then reads
        """
        return self.pages(name, x, *x.shape[1:])

    def pages(self, name: str, x: Tensor, heads: int, dim: int) -> Tensor:
        """`pages_like` for this number of heads and this dim, in the dtype and on the device of x."""
        key = (name, heads, dim, x.dtype)
        if key not in self._pages:
            on_cpu = x.device.type == "cpu"
            shape = (self.page_size, heads) if on_cpu else (heads, self.page_size)
            pages = x.new_empty(self.num_pages, *shape, dim)
            self._pages[key] = pages if on_cpu else pages.transpose(1, 2)
        return self._pages[key]

    def _angles(self, embeddings: Any, batch: int, length: int) -> list[Tensor]:
        """Cosines and sines of the tokens, kept for other layers: layers with the same rotary embedding get the same object."""
        known = self._tables.get(id(embeddings))
        if known is None:
            tables = [self.rows.pack(table.expand(batch, length, -1)) for table in tables_of(embeddings)]
            known = self._tables[id(embeddings)] = (embeddings, tables)
        return known[1]

    def train_layer(self, layer: FusedLayer, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A fused layer on all tokens of the batch, (batch, tokens, hidden). Padding stays as it is."""
        checkpoint = missing_checkpoint(layer.module)
        if checkpoint is None:
            return self._train_layer(layer, kwargs, hidden_states, *args)
        out: Tensor = checkpoint(partial(self._train_layer, layer, kwargs), hidden_states, *args)
        return out

    def _train_layer(self, layer: FusedLayer, kwargs: dict[str, Any], hidden_states: Tensor, *args: Any) -> Tensor:
        """A fused layer that is not checkpointed, or within its checkpoint."""
        if not torch.is_grad_enabled():
            return self._compute_layer(layer, hidden_states, kwargs)
        module = layer.module
        if module not in self._again:
            self._again[module] = parameters_computed_again(layer)
        if not self._again[module]:
            return self._record_layer(layer, hidden_states, kwargs)
        own = forward_within_checkpoint(module)
        return layer_computed_again(
            LayerAgain(
                partial(self._compute_layer, layer, kwargs=kwargs),
                lambda x: own(x, *args, **kwargs),
                self.state.with_settings,
            ),
            hidden_states,
            self._again[module],
        )

    def _compute_layer(self, layer: FusedLayer, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The output of a fused layer, without gradients: its keys and values go to pages, as in a step of the engine."""
        rows = self.rows
        # the layer overwrites its input
        x = rows.pack(hidden_states.clone() if rows.valid is None else hidden_states)
        out = layer.compute(x, self._step(layer, hidden_states, kwargs, None))
        return rows.unpack(out, hidden_states)

    def _record_layer(self, layer: FusedLayer, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The output of a fused layer, where autograd records each of its operators."""
        rows = self.rows
        x = rows.pack(hidden_states if hidden_states.requires_grad or rows.valid is not None else hidden_states.clone())
        lse = empty_lse(x, cast(HeadsAttention, layer.attention).num_heads)
        call = TrainedCall(self.batch, layer.options, self.deterministic)
        step = self._step(layer, hidden_states, kwargs, lse)
        out = layer.compute(x, step._replace(record=partial(heads_with_gradients, call=call, lse=lse)))
        return rows.unpack(out, hidden_states)

    def _step(self, layer: FusedLayer, hidden_states: Tensor, kwargs: dict[str, Any], lse: Tensor | None) -> LayerStep:
        """The arguments of a fused layer. lse: receives the lse of its attention, or None"""
        attention = cast(HeadsAttention, layer.attention)
        cos, sin = self._angles(kwargs["position_embeddings"], *hidden_states.shape[:2])
        heads = (attention.num_kv_heads, attention.head_dim)
        index = cast(int, layer.index)
        caches = {index: (self.pages("keys", hidden_states, *heads), self.pages("values", hidden_states, *heads))}
        return layer.step(replace(self.batch, kv_caches=caches, lse=lse), index, cos, sin)

    def attend(self, call: LayerCall) -> Tensor:
        """Causal attention within each sequence -> (batch, tokens, num_heads, head_dim_v), 0 for padding."""
        batch, _, length, _ = call.query.shape
        q, k, v = (self.rows.pack(x.transpose(1, 2)) for x in (call.query, call.key, call.value))
        trained = TrainedCall(self.batch, _options_of(call), self.deterministic)
        compute = partial(self._attend_rows, call)
        out: Tensor = AttentionWithGradients.apply(q, k, v, call.sinks, trained, compute)  # type: ignore[no-untyped-call]
        if self.rows.valid is None:
            return out.view(batch, length, *out.shape[1:])
        return self.rows.unpack(out, out.new_zeros(batch, length, *out.shape[1:]))

    def _attend_rows(self, call: LayerCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The engine's attention for the call of a layer: (out, lse)."""
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        own = call._replace(query=query, key=key, value=value, sinks=sinks)
        index = int(cast(Any, call.module).layer_idx)
        caches = {index: (self.pages_like("keys", k), self.pages_like("values", v))}
        lse = empty_lse(q, q.shape[1])
        return replace(self.batch, kv_caches=caches, lse=lse).attend(own)[0], lse


def _options_of(call: LayerCall) -> dict[str, Any]:
    """The options of a layer's attention, without its tensors."""
    return {
        "left": call.window_size[0],
        "attention_chunk": call.attention_chunk,
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
    }


def _experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The implementation of experts in the context. Arguments and result are those of `mixtures.experts_forward`."""
    x = hidden_states.to(cast(Any, module).down_proj.dtype)
    y = experts_with_gradients(x, top_k_index, top_k_weights, weights_of(module, gate_of(module)))
    return y.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
