"""A transformer and its head on sequences that are packed end to end, without padding.

    model = PackedModel(transformers_model)
    hidden = model.hidden(inputs)                       # (total, hidden_size), of all tokens
    logits = model.label_logits(hidden, inputs)         # (sequences, labels), of a model for sequence classification

transformers' models take packed sequences as a batch of one with `position_ids` that restart and with `cu_seq_lens_q`, which
reach the attention of fa_serve. A trial shows whether a model follows these: two sequences are computed packed and one by one,
and a model whose results differ is computed in padded batches, or one by one if padding changes its results as well (ConvBERT).
A classification head reads one token of a sequence, or the mean of its tokens. A trial shows which one, too, and the head's own
code then gets only that row. For a head that reads anything else, the whole model is computed, padded or one by one.
Left out: pooling (modules.py), and which sequences are computed together (fa_serve.engine.pooling).
"""

from __future__ import annotations

import copy
import inspect
import logging
import typing
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils.generic import ModelOutput

from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.models import counts_positions
from fa_serve.hf.adapter.packed_forwards import first_position
from fa_serve.hf.adapter.paged import PagedBatch
from fa_serve.hf.surgery.fuse.encoder import fuse_encoder, unfuse_encoder
from fa_serve.hf.surgery.fuse.fusion import fuse_layers, unfuse_model
from fa_serve.hf.surgery.fuse.layer import FusedLayer, HeadsAttention
from fa_serve.spec import UnsupportedModelError

log = logging.getLogger("fa_serve.engine")

TOLERANCE = 1e-3
"""The largest allowed difference between packed sequences and the same sequences computed alone, relative to the largest
number, in float32. Another order of summation gives 1e-6; a sequence that sees its neighbour gives 0.1 and more."""
COARSE_TOLERANCE = 0.05
"""The same for dtypes of 16 bits."""
PROBE_LENGTHS = (5, 9)
Batches = Literal["packed", "padded", "single"]
"""How the sequences of a batch are computed: end to end, next to each other with padding, or one by one."""
_TRIAL_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model's code raises for inputs that it does not take."""
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]
_OUTPUTS = {"last_hidden_state", "logits"}
"""Fields of an output that have a value for each token. Fuyu's output class declares logits but holds hidden states."""
HEAD_TOKENS = 256
"""Tokens whose logits over the vocabulary are in memory at once."""


class PackedInputs(NamedTuple):
    """Sequences end to end.

    ids:        (total,) int64
    type_ids:   (total,) int64, or None for a model without types of tokens
    positions:  (total,) int64, from 0 in each sequence
    cu_seqlens: (sequences + 1,) int32, on the device of `ids`
    lengths:    the lengths of the sequences, on the host
    words:      int64: the one buffer of which all these tensors are views
    """

    ids: Tensor
    type_ids: Tensor | None
    positions: Tensor
    cu_seqlens: Tensor
    lengths: list[int]
    words: Tensor

    @classmethod
    def of(
        cls,
        ids: Integers,
        types: Integers | None,
        ends: Sequence[int] | Integers,
        device: torch.device,
        there: PackedInputs | None = None,
    ) -> PackedInputs:
        """Send all tensors to the device in one copy. On a GPU the copy is asynchronous.

        ids, types: (total,) integers; ends: (sequences + 1,): where each sequence begins, and the end of the last one
        there:      inputs with as many tokens and sequences, whose memory is overwritten; None allocates new memory
        """
        borders = np.asarray(ends, dtype=np.int64)
        lengths = np.diff(borders)
        total = len(ids)
        num_rows = 2 if types is None else 3
        first = -(-len(borders) // 4) * 2  # cu_seqlens comes first, because kernels may need it 16-byte aligned
        words = torch.empty(first + num_rows * total, dtype=torch.int64, pin_memory=device.type == "cuda")
        words[:first].view(torch.int32).numpy()[: len(borders)] = borders
        rows = words[first:].view(num_rows, total).numpy()
        rows[0] = ids
        np.subtract(np.arange(total), np.repeat(borders[:-1], lengths), out=rows[1])
        if types is not None:
            rows[2] = types
        words = words.to(device, non_blocking=True) if there is None else there.words.copy_(words, non_blocking=True)
        rows_there = words[first:].view(num_rows, total)
        cu_seqlens = words[:first].view(torch.int32)[: len(borders)]
        types_there = None if types is None else rows_there[2]
        return cls(rows_there[0], types_there, rows_there[1], cu_seqlens, lengths.tolist(), words)

    @property
    def last(self) -> Tensor:
        """(sequences,) int64: the row of each sequence's last token."""
        return self.cu_seqlens[1:].long() - 1

    @property
    def first(self) -> Tensor:
        """(sequences,) int64: the row of each sequence's first token."""
        return self.cu_seqlens[:-1].long()


class _Given(nn.Module):
    """Replaces the transformer below a head, and returns the hidden states that it has been given."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = [pooler]  # in a list, so that it is no submodule
        self.hidden: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        assert self.hidden is not None
        pooler = self._pooler[0]
        pooled = None if pooler is None else pooler(self.hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden, pooler_output=pooled)  # type: ignore[arg-type]


def require_text(base: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless this transformer computes a hidden state for each token of a text.

    Its class and its config show this: models of images, sounds or time series have other inputs, and models with two towers,
    such as CLIP, return one vector for a text and one for an image.
    """
    name = type(base).__name__
    text = base.config.get_text_config()
    words = inspect.signature(base.forward).parameters
    needed = [word.name for word in words.values() if word.default is word.empty and word.kind is word.POSITIONAL_OR_KEYWORD]
    lacking = [size for size in ("hidden_size", "vocab_size") if not isinstance(getattr(text, size, None), int)]
    outputs = [kind for kind, names in _outputs(base).items() if not _OUTPUTS & names]
    if base.main_input_name != "input_ids" and base.main_input_name in [*words]:
        why = f"its main input is {base.main_input_name}"
    elif "input_ids" not in words:
        why = "its forward takes no input_ids"
    elif others := [word for word in needed if word != "input_ids"]:
        why = f"its forward needs {', '.join(others)}"
    elif lacking:
        why = f"its config has no {' and no '.join(lacking)}"
    elif outputs:
        why = f"it returns {outputs[0]}, which has no last_hidden_state"
    else:
        return
    raise UnsupportedModelError(
        f"{name} does not compute hidden states of text alone, because {why}: fa_serve serves embeddings of text encoders only"
    )


def _outputs(base: PreTrainedModel) -> dict[str, set[str]]:
    """The output classes in the return annotation of the forward, by name, with their fields."""
    try:
        told = typing.get_type_hints(inspect.unwrap(type(base).forward)).get("return")
    except NameError:  # an annotation names something that its module does not have
        return {}
    kinds = [kind for kind in (told, *typing.get_args(told)) if isinstance(kind, type) and issubclass(kind, ModelOutput)]
    named = {kind.__name__: {*getattr(kind, "__dataclass_fields__", ())} for kind in kinds}
    return {kind: names for kind, names in named.items() if names}


class PackedModel:
    """A transformer that computes packed sequences.

    model: in evaluation mode, on its device; a transformer, or a transformer with a head

    Raises UnsupportedModelError as `require_text` does.

    num_ids: number of token ids that the model has embeddings for
    first_position: the position that the model gives to the first token of a sequence
    batches: how hidden states are computed; packs: whether they are computed packed
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.base = cast(PreTrainedModel, model.base_model)
        require_text(self.base)
        words = inspect.signature(self.base.forward).parameters
        self._takes_types = "token_type_ids" in words
        self._has_cache = "use_cache" in words
        self.num_ids: int = len(cast(nn.Embedding, self.base.get_input_embeddings()).weight)
        self.first_position = self._position_of_first()
        self._padding = self.first_position - 1 if self.first_position else None
        self._passes_padding = False
        self._head, self._given = _head_of(model, self.base)
        self._reads: str | None = None
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}
        self._classifies = self._head is not None and type(model).__name__.endswith("ForSequenceClassification")
        self._pads_whole = False
        with torch.inference_mode():
            self.batches = self._find_batches()
            if self._classifies:
                self._try_head()

    @property
    def packs(self) -> bool:
        return self.batches == "packed"

    def fuse(self) -> int:
        """Compute layers by fewer kernels if this does not change the result. Returns how many layers are fused."""
        if not self.packs:
            return 0
        inputs = self._probe()
        with torch.inference_mode():
            wanted = self._packed(inputs)
            fused = fuse_encoder(self.base, lambda batch: self._packed(inputs, fa_serve_batch=batch)) or self._fuse_decoder()
            if fused and not self._agrees(lambda: self._packed(inputs), wanted):
                self._unfuse()
                name = type(self.base).__name__
                log.warning("the fused layers of %s give a different result when run together; they stay unfused", name)
                return 0
        return fused

    def _fuse_decoder(self) -> int:
        """Fuse the layers of a decoder as the engine does. Fused layers need a cache for keys and values, so each gets one with
        a single slot. `_step` maps no token to the slot, so nothing is written."""
        if not any(getattr(module, "self_attn", None) is not None for module in self.base.modules()):
            return 0
        fused = fuse_layers(self.base)
        for module in self.base.modules():
            layer = vars(module).get("forward")
            if isinstance(layer, FusedLayer) and isinstance(layer.attention, HeadsAttention) and layer.index is not None:
                heads = layer.attention
                cache = torch.empty(1, 1, heads.num_kv_heads, heads.head_dim, dtype=self.model.dtype, device=self.device)
                self._caches[layer.index] = (cache, cache)
        return fused

    def _unfuse(self) -> None:
        unfuse_encoder(self.base)
        unfuse_model(self.base)
        self._caches.clear()

    @property
    def reads_rows(self) -> bool:
        """Whether the classification head is computed from hidden states, and not by the whole model."""
        return self._reads is not None

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """The last hidden states of all tokens -> (total, hidden_size)."""
        match self.batches:
            case "packed":
                return self._packed(inputs)
            case "padded":
                return self._padded(inputs)
            case "single":
                return self._single(inputs)

    def label_logits(self, hidden: Tensor, inputs: PackedInputs) -> Tensor:
        """The logits of a head for sequence classification -> (sequences, labels). hidden: the result of `hidden(inputs)`"""
        if self._reads is None:
            return self._padded_logits(inputs) if self._pads_whole else self._single_logits(inputs)
        return self._read(*self._rows_of(hidden, inputs))

    def token_logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The logits of a head for masked words: (first row, (rows, vocabulary)), a few rows at a time."""
        assert self._head is not None
        assert self._given is not None
        for begin in range(0, len(hidden), HEAD_TOKENS):
            rows = hidden[begin : begin + HEAD_TOKENS]
            self._given.hidden = rows[None]
            ids = torch.zeros((1, len(rows)), dtype=torch.int64, device=self.device)
            yield begin, self._logits(self._head(input_ids=ids))[0]
        self._given.hidden = None

    def _position_of_first(self) -> int:
        """The position of a first token: models like fairseq's count from the row after the padding row in their table."""
        return first_position(self.base) if counts_positions(type(self.base)) else 0

    def _words(self, types: Tensor | None) -> dict[str, Any]:
        words: dict[str, Any] = {"use_cache": False} if self._has_cache else {}
        return words | ({"token_type_ids": types} if types is not None and self._takes_types else {})

    def _packed(self, inputs: PackedInputs, **more: Any) -> Tensor:
        ids = inputs.ids[None]
        positions = self._positions(inputs)[None]
        longest = max(inputs.lengths)
        if self._caches:
            output = self._step(ids, positions, inputs.cu_seqlens, longest)
        else:
            output = self.base(
                input_ids=ids,
                position_ids=positions,
                cu_seq_lens_q=inputs.cu_seqlens,
                cu_seq_lens_k=inputs.cu_seqlens,
                max_length_q=longest,
                max_length_k=longest,
                **self._words(None if inputs.type_ids is None else inputs.type_ids[None]),
                **more,
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _positions(self, inputs: PackedInputs) -> Tensor:
        """(total,) int64: the position of each token, as the model counts. Models like fairseq's count no padding tokens, which
        a text can contain as well, and give all of them the position before the first."""
        if self._padding is None:  # then the first position is 0
            return inputs.positions
        counts = inputs.ids != self._padding
        total = counts.cumsum(0)
        firsts = torch.arange(len(total), device=total.device) - inputs.positions
        before = (total - counts.long())[firsts]
        return (total - before) * counts + self.first_position - 1

    def _step(self, ids: Tensor, positions: Tensor, cu_seqlens: Tensor, longest: int) -> Any:
        """The output of a decoder with fused layers: a step of new sequences, whose tokens are not cached."""
        batch = PagedBatch(
            kv_caches=self._caches,
            slot_mapping=torch.full_like(ids[0], -1),
            block_table=cu_seqlens.new_zeros(len(cu_seqlens) - 1, 1),
            seqused_k=cu_seqlens.diff(),
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            fresh=True,
        )
        no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=ids.device)  # see `paged_output`
        words = self._words(None)
        with riding(batch):
            return self.base(input_ids=ids, position_ids=positions, attention_mask=no_mask, fa_serve_batch=batch, **words)

    def _padded(self, inputs: PackedInputs) -> Tensor:
        ids, mask, types = _pad(inputs)
        hidden: Tensor = self.base(input_ids=ids, attention_mask=mask, **self._words(types)).last_hidden_state
        return hidden[mask.bool()]

    def _single(self, inputs: PackedInputs) -> Tensor:
        return torch.cat([output.last_hidden_state[0] for output in self._alone(inputs)])

    def _padded_logits(self, inputs: PackedInputs) -> Tensor:
        ids, mask, types = _pad(inputs)
        return self._logits(self.model(input_ids=ids, attention_mask=mask, **self._words(types)))

    def _single_logits(self, inputs: PackedInputs) -> Tensor:
        return torch.cat([self._logits(output) for output in self._alone(inputs, whole=True)])

    def _alone(self, inputs: PackedInputs, whole: bool = False) -> list[Any]:
        """The output of the transformer, or of the whole model, for each sequence by itself."""
        outputs = []
        for begin, end in pairwise(inputs.cu_seqlens.tolist()):
            ids = inputs.ids[None, begin:end]
            types = None if inputs.type_ids is None else inputs.type_ids[None, begin:end]
            model = self.model if whole else self.base
            outputs.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), **self._words(types)))
        return outputs

    def _probe(self) -> PackedInputs:
        """Two sequences of ids that are special tokens in no known vocabulary; models like fairseq's skip the padding id."""
        total = sum(PROBE_LENGTHS)
        size = self.num_ids
        ids = (size // 2 + np.arange(total) * 7 % max(size // 2, 1)).clip(max=size - 1)
        return PackedInputs.of(ids, None, [0, *accumulate(PROBE_LENGTHS)], self.device)

    def _find_batches(self) -> Batches:
        inputs = self._probe()
        try:
            wanted = self._single(inputs)
        except _TRIAL_ERRORS:
            if not self._classifies:
                raise
            return "single"  # T5 needs tokens for its decoder, which only the whole model makes
        if self._agrees(lambda: self._packed(inputs), wanted):
            return "packed"
        return "padded" if self._agrees(lambda: self._padded(inputs), wanted) else "single"

    def _try_head(self) -> None:
        """Find which row of a sequence the head reads, or if it reads anything else, whether the whole model can be padded."""
        inputs = self._probe()
        try:
            wanted = self._single_logits(inputs)
        except _TRIAL_ERRORS:
            return  # BART's head reads the last token of the end, and these sequences have none
        for name, rows in _ROWS.items():

            def read(rows: Callable[[Tensor, PackedInputs], Tensor] = rows) -> Tensor:
                return self._read(rows(self.hidden(inputs), inputs), inputs.ids[inputs.last])

            if self._agrees(read, wanted):
                self._reads = name
                self._passes_padding = name == "last" and self._skips_padding()
                return
        self._pads_whole = self._agrees(lambda: self._padded_logits(inputs), wanted)

    def _skips_padding(self) -> bool:
        """Whether a head that reads the last token passes over padding tokens at the end, as those of transformers do."""
        padding = self._id_of_padding()
        if padding is None:
            return False
        inputs = self._probe()
        inputs.ids[-2:] = padding
        try:
            wanted = self._single_logits(inputs)
        except _TRIAL_ERRORS:
            return False
        last = inputs.last - torch.tensor([0, 2], device=inputs.last.device)
        return self._agrees(lambda: self._read(self.hidden(inputs)[last], inputs.ids[last]), wanted)

    def _id_of_padding(self) -> int | None:
        padding = getattr(self.base.config, "pad_token_id", None)
        return padding if isinstance(padding, int) and 0 <= padding < self.num_ids else None

    def _rows_of(self, hidden: Tensor, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        """What the head reads of each sequence -> (sequences, hidden_size), and (sequences,) an id that is no padding."""
        assert self._reads is not None
        padding = self._id_of_padding()
        if not self._passes_padding or padding is None:
            return _ROWS[self._reads](hidden, inputs), inputs.ids[inputs.last]
        indices = torch.arange(len(inputs.ids), device=inputs.ids.device)
        ends = torch.where(inputs.ids != padding, indices, 0)
        last = torch.maximum(ends.cummax(0).values[inputs.last], inputs.first)  # the first one of a sequence of padding
        return hidden[last], inputs.ids[last]

    def _agrees(self, compute: Callable[[], Tensor], wanted: Tensor) -> bool:
        try:
            found = compute()
        except _TRIAL_ERRORS:
            return False
        if found.shape != wanted.shape:
            return False
        tolerance = TOLERANCE if wanted.dtype in (torch.float32, torch.float64) else COARSE_TOLERANCE
        difference = (found.double() - wanted.double()).abs().max()
        return bool(difference <= tolerance * wanted.double().abs().max())

    def _read(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The head's logits for one row of each sequence. ids: (sequences,), tokens that are no padding"""
        assert self._head is not None
        assert self._given is not None
        self._given.hidden = rows[:, None]
        try:
            mask = torch.ones_like(ids)[:, None]
            return self._logits(self._head(input_ids=ids[:, None], attention_mask=mask))
        finally:
            self._given.hidden = None

    @staticmethod
    def _logits(output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits


def _first_rows(hidden: Tensor, inputs: PackedInputs) -> Tensor:
    return hidden[inputs.first]


def _last_rows(hidden: Tensor, inputs: PackedInputs) -> Tensor:
    return hidden[inputs.last]


def _mean_rows(hidden: Tensor, inputs: PackedInputs) -> Tensor:
    lengths = inputs.cu_seqlens.diff().long()
    return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, axis=0, unsafe=True).to(hidden.dtype)


_ROWS: dict[str, Callable[[Tensor, PackedInputs], Tensor]] = {"first": _first_rows, "last": _last_rows, "mean": _mean_rows}


def _head_of(model: PreTrainedModel, base: PreTrainedModel) -> tuple[nn.Module | None, _Given | None]:
    """A copy of the model that shares all modules except the transformer, and what replaces it; None without a head."""
    prefix = model.base_model_prefix
    if base is model or prefix not in model._modules:
        return None, None
    given = _Given(getattr(base, "pooler", None))
    head = copy.copy(model)
    head._modules = {name: given if name == prefix else module for name, module in model._modules.items()}
    return head, given


def _pad(inputs: PackedInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """ids, mask and token types, each (sequences, longest), with padding on the right."""
    lengths = torch.tensor(inputs.lengths, device=inputs.ids.device)
    mask = torch.arange(max(inputs.lengths), device=inputs.ids.device)[None] < lengths[:, None]

    def padded(values: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=torch.int64, device=values.device).masked_scatter_(mask, values)

    types = None if inputs.type_ids is None else padded(inputs.type_ids)
    return padded(inputs.ids), mask.long(), types
