"""An EAGLE-3 head: one decoder layer that guesses a model's next tokens from that model's hidden states.

    head = load_head(folder, model)                  # raises an error that says why a head does not fit
    features = head.combine(states)                  # hidden states of three layers -> (total, hidden)
    output = head(input_ids, hidden_states=features, position_ids=positions, logits_to_keep=rows)
    output.logits, output.hidden_states              # the hidden states replace features in the next guess

At position p the head takes the model's feature of token p and the embedding of token p + 1, and gives logits for token p + 2.
Queries, keys and values are computed from the two, concatenated. The head's vocabulary may be a part of the model's; other
tokens have a logit of -inf.

Checkpoints are those of the EAGLE authors, SpecForge, SGLang, vLLM and vLLM's speculators: tensors `fc`, `midlayer.*` or
`layers.0.*`, `norm`, `lm_head`, `d2t` (the difference between the model's id and the head's id of a token), and maybe
`embed_tokens`; without it, the head uses the model's embedding. Left out: quantised heads, heads with several layers, and norms
before `fc`. All of these are refused.
Source: Li et al. 2025, https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.surgery.divide.weights import vocab_size
from fa_serve.spec import UnsupportedModelError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""The names that configs have for this one architecture."""
IGNORED = ("t2d", "self_attn.rotary_emb.inv_freq")
"""Tensors of checkpoints that are not read, because they follow from other tensors or the config."""


class Eagle3Head(LlamaPreTrainedModel):  # type: ignore[no-untyped-call]
    """The head. `head_config` makes its config. Its embedding may be the model's.

    depths: the depths of the model's hidden states that the head takes, as in `HiddenStateReader`
    """

    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.depths: tuple[int, ...] = tuple(config.depths)
        self.embed_tokens: nn.Module = nn.Identity()  # `load_head` sets it
        self.fc = nn.Linear(len(self.depths) * config.target_hidden_size, hidden, bias=config.fc_bias)
        self.input_layernorm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            single = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * hidden, single.out_features, bias=config.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        mlp: Any = LlamaMLP
        self.mlp = mlp(config)
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.targets: Tensor | None  # the model's token id for each token id of the head; None if they are the same
        self.register_buffer("targets", None, persistent=False)

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of the model at `depths`, (1, total, target_hidden) each -> features (total, hidden)."""
        features: Tensor = self.fc(torch.cat(list(states), dim=-1))
        return features[0]

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """One step of the head.

        input_ids:     (1, total) int64: for each feature, the token after the feature's token
        hidden_states: (1, total, hidden), features or earlier outputs; zeros by default
        Returns logits (1, n, vocab) in the model's vocabulary, and as hidden_states the output before the last norm, (1, total,
        hidden). The head keeps no cache itself: `use_cache` is ignored.
        """
        embeds = self.embed_tokens(input_ids)
        if hidden_states is None:
            hidden_states = torch.zeros_like(embeds)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        no_cache = None
        mask = create_causal_mask(self.config, embeds, attention_mask, no_cache, position_ids)
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.config.norm_before_residual else hidden_states
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        rotary = self.rotary_emb(embeds, position_ids=position_ids)
        attended, _ = self.self_attn(both, position_embeddings=rotary, attention_mask=mask, **kwargs)
        x = residual + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        rows = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self._in_vocabulary(self.lm_head(self.norm(x[:, rows])))
        return CausalLMOutputWithPast(logits=cast(Any, logits), hidden_states=cast(Any, x))

    def _in_vocabulary(self, logits: Tensor) -> Tensor:
        """(1, n, draft_vocab_size) -> (1, n, vocab_size)"""
        if self.targets is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return whole.index_copy_(-1, self.targets, logits)


def load_head(folder: Path, model: PreTrainedModel) -> Eagle3Head:
    """The head in this folder, on the model's device and in its dtype.

    Raises UnsupportedModelError, with the reason, for an unknown format and for the head of another model. Errors of reading a
    file propagate.
    """
    text = model.config.get_text_config()
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError("its folder has no config.json")
    tensors = _read_tensors(folder)
    config = head_config(json.loads((folder / "config.json").read_bytes()), text.num_hidden_layers)
    config.fc_bias = "fc.bias" in tensors
    _check_size("each hidden state that it takes", config.target_hidden_size, text.hidden_size)
    _check_size("its vocabulary", config.vocab_size, vocab_size(model))
    with torch.device(model.device):
        made: Any = Eagle3Head
        head: Eagle3Head = made._from_config(config, dtype=model.dtype, attn_implementation=NAME)
    _embed(head, tensors.pop("embed_tokens.weight", None), model.get_input_embeddings())
    _set_targets(head, tensors.pop("d2t", None))
    own = {name: x for name, x in head.state_dict().items() if not name.startswith("embed_tokens.")}
    if missing := sorted(own.keys() - tensors.keys()):
        raise UnsupportedModelError(f"its checkpoint lacks {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - own.keys()):
        raise UnsupportedModelError(f"its checkpoint has tensors that fa_serve does not know: {', '.join(unknown)}")
    for name, x in own.items():
        _check_shape(name, tensors[name], tuple(x.shape))
    head.load_state_dict(tensors, strict=False)
    return head


def head_config(told: Mapping[str, Any], num_layers: int) -> LlamaConfig:
    """The config of `Eagle3Head`: its layer's config with depths, draft_vocab_size, target_hidden_size, norm_before_residual.

    told: config.json of the head; num_layers: number of layers of the model
    Raises UnsupportedModelError for an architecture or a value that fa_serve does not know.
    """
    named = told.get("architectures") or []
    kind = told.get("speculators_model_type")
    if not set(named) & set(ARCHITECTURES) or kind not in (None, "eagle3"):
        found = kind or ", ".join(named) or "no architecture"
        raise UnsupportedModelError(f"its config says {found} instead of {ARCHITECTURES[0]}")
    eagle = told.get("eagle_config") or {}
    layer = dict(told.get("transformer_layer_config") or told)
    refused = {
        "model_type": layer.get("model_type", "llama") != "llama",
        "num_hidden_layers": layer.get("num_hidden_layers", 1) != 1,
        "norm_before_fc": told.get("norm_before_fc", False),
        "use_aux_hidden_state": not eagle.get("use_aux_hidden_state", True),
        "quantization_config": told.get("quantization_config") is not None,
    }
    if unknown := [name for name, found in refused.items() if found]:
        raise UnsupportedModelError(f"its config has a value of {unknown[0]} that fa_serve does not support")
    config = LlamaConfig.from_dict(layer | {"num_hidden_layers": 1, "tie_word_embeddings": False})
    config.draft_vocab_size = told.get("draft_vocab_size") or config.vocab_size
    config.target_hidden_size = told.get("target_hidden_size") or config.hidden_size
    config.norm_before_residual = bool(told.get("norm_before_residual", kind == "eagle3"))
    config.depths = _depths(told.get("eagle_aux_hidden_state_layer_ids"), eagle, num_layers)
    config.fc_bias = False
    return config


def _depths(listed: Sequence[int] | None, eagle: Mapping[str, Any], num_layers: int) -> list[int]:
    """After how many layers of the model the head takes hidden states.

    A list at the top level of the config counts the layers before each state, as vLLM reads it. A list in `eagle_config` does
    the same, unless it begins with 1. Then it has indices of layers, from 0 on, whose outputs are taken, as SGLang reads it.
    """
    if listed:
        return list(listed)
    if nested := eagle.get("eagle_aux_hidden_state_layer_ids"):
        return [index + 1 for index in nested] if nested[0] == 1 else list(nested)
    return [2, num_layers // 2, num_layers - 3]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with the parameter names of `Eagle3Head`."""
    read: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        read |= load_file(file)
    for file in [] if read else sorted(folder.glob("pytorch_model*.bin")):
        read |= torch.load(file, map_location="cpu", weights_only=True)
    if not read:
        raise UnsupportedModelError("its folder has neither *.safetensors nor pytorch_model*.bin")
    named = {}
    for name, x in read.items():
        own = name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
        if own not in IGNORED:
            named[own] = x
    return named


def _embed(head: Eagle3Head, own: Tensor | None, shared: nn.Module) -> None:
    """Give the head its checkpoint's embedding, or the model's if the checkpoint has none or an equal one."""
    weight = cast(Tensor, shared.weight)
    if own is not None:
        _check_shape("embed_tokens.weight", own, (head.config.vocab_size, head.config.hidden_size))
        own = own.to(weight)
    else:
        _check_size("each embedding that it takes (its checkpoint has none)", head.config.hidden_size, weight.shape[1])
    is_shared = own is None or (own.shape == weight.shape and torch.equal(own, weight))
    head.embed_tokens = shared if own is None or is_shared else nn.Embedding(len(own), own.shape[1], _weight=own)


def _set_targets(head: Eagle3Head, offsets: Tensor | None) -> None:
    """Set the model's token id for each token id of the head. offsets: (draft_vocab_size,): the differences of the two"""
    config = head.config
    whole = config.draft_vocab_size == config.vocab_size
    if offsets is None and not whole:
        raise UnsupportedModelError(f"its vocabulary has {config.draft_vocab_size} tokens, but its checkpoint has no d2t")
    if offsets is None or (whole and not offsets.any()):
        return
    _check_shape("d2t", offsets, (config.draft_vocab_size,))
    targets = torch.arange(len(offsets)) + offsets.long().cpu()
    if targets.min() < 0 or targets.max() >= config.vocab_size or len({*targets.tolist()}) != len(targets):
        raise UnsupportedModelError(f"its d2t names a token twice, or one outside the model's {config.vocab_size} tokens")
    head.targets = targets.to(head.device)


def _check_size(what: str, size: int, size_of_model: int) -> None:
    if size != size_of_model:
        raise UnsupportedModelError(f"{what} has the size {size}, but the size in the model is {size_of_model}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise UnsupportedModelError(f"its tensor {name} has the shape {tuple(tensor.shape)}, but its config says {shape}")
