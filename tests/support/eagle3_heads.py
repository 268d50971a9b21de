"""EAGLE-3 heads for tiny models, as the checkpoints in which such heads are published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES, VOCAB, make_model
from torch import Tensor
from transformers import PreTrainedModel

HIDDEN = SIZES["hidden_size"]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 16,
    "attention_bias": True,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
"""A config of the EAGLE authors and SpecForge. Tiny models have two layers: too few for the depths that are the default."""


def quiet_model(family: str = "llama", loudness: float = 0.0) -> PreTrainedModel:
    """A model whose next token depends on the last token alone, or nearly so: its layers add `loudness` of what they would."""
    model = make_model(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= loudness
    return model


def copying_head(
    model: PreTrainedModel, noise: float = 0.0, targets: Sequence[int] = range(VOCAB), focus: float = 20.0
) -> dict[str, Tensor]:
    """The tensors of a head that draws what a quiet model draws: it hands on the embedding of the last token.

    Large equal biases of queries and keys let a position attend to itself alone. noise: how much of the hidden states it
    adds. targets: the tokens of its vocabulary; focus: these biases, with less of which it attends to earlier positions as well
    """
    torch.manual_seed(2)
    eye = torch.eye(HIDDEN)
    ones = torch.ones(HIDDEN)
    out = torch.zeros(HIDDEN, 4 * 16)
    out[:16, :16] = eye[:16, :16]
    out[16:, 32:48] = eye[:16, :16]
    layer = {
        "self_attn.q_proj.weight": noise * torch.randn(64, 2 * HIDDEN),
        "self_attn.k_proj.weight": noise * torch.randn(32, 2 * HIDDEN),
        "self_attn.v_proj.weight": torch.cat([eye, 0 * eye], dim=1),
        "self_attn.o_proj.weight": out,
        "self_attn.q_proj.bias": focus * torch.ones(64),
        "self_attn.k_proj.bias": focus * torch.ones(32),
        "self_attn.v_proj.bias": torch.zeros(32),
        "self_attn.o_proj.bias": torch.zeros(HIDDEN),
        "mlp.gate_proj.weight": torch.randn(48, HIDDEN) / HIDDEN**0.5,
        "mlp.up_proj.weight": torch.randn(48, HIDDEN) / HIDDEN**0.5,
        "mlp.down_proj.weight": 0.1 * noise * torch.randn(HIDDEN, 48),
        "input_layernorm.weight": ones,
        "hidden_norm.weight": noise * ones,
        "post_attention_layernorm.weight": ones.clone(),
    }
    known = torch.tensor(list(targets))
    top: Any = model.get_output_embeddings()
    return {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) / 10,
        **{f"midlayer.{name}": x for name, x in layer.items()},
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": top.weight.detach()[known].clone(),
        "d2t": known - torch.arange(len(known)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, True),
    }


def save_head(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    """Write a checkpoint. changes: of the config; None leaves a field out. Returns the engine's `speculative`."""
    folder.mkdir(parents=True, exist_ok=True)
    told = CONFIG | {"draft_vocab_size": len(tensors.get("d2t", range(VOCAB)))} | changes
    config = {name: value for name, value in told.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return f"eagle3={folder}"


def reference(tensors: dict[str, Tensor], embedding: Tensor, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A head with the sizes of CONFIG, as an equation: features (n, hidden), and the tokens after them (n,).

    Returns logits (n, draft_vocab_size), and the output before the last norm (n, hidden).
    """
    t = {name.removeprefix("midlayer."): x.to(features.dtype) for name, x in tensors.items()}
    n = len(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * t[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros((), dtype=x.dtype))

    def rotate(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(n), CONFIG["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)).to(x.dtype)[:, None]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)

    normed = norm(features, "hidden_norm")
    both = torch.cat([norm(embedding.to(features.dtype)[tokens], "input_layernorm"), normed], dim=-1)
    q = rotate(linear(both, "self_attn.q_proj").view(n, 4, 16))
    k = rotate(linear(both, "self_attn.k_proj").view(n, 2, 16)).repeat_interleave(2, dim=1)
    v = linear(both, "self_attn.v_proj").view(n, 2, 16).repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 4
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = (normed if CONFIG["norm_before_residual"] else features) + linear(attended, "self_attn.o_proj")
    m = norm(x, "post_attention_layernorm")
    x = x + linear(torch.nn.functional.silu(linear(m, "mlp.gate_proj")) * linear(m, "mlp.up_proj"), "mlp.down_proj")
    return linear(norm(x, "norm"), "lm_head"), x


@torch.no_grad()
def reference_drafts(model: PreTrainedModel, tensors: dict[str, Tensor], tokens: list[int], count: int) -> list[int]:
    """What a head guesses greedily after these tokens, when everything is computed anew for each guess."""
    states: list[Tensor] = []
    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, x: states.append(x[0][0])) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda _m, _x, y: states.append(y[0])))
    model(input_ids=torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    features = (torch.cat(states, dim=-1) @ tensors["fc.weight"].T)[:-1]
    embedding = model.get_input_embeddings().weight
    following = list(tokens[1:])
    for _ in range(count):
        logits, outputs = reference(tensors, embedding, features, torch.tensor(following))
        best = int(logits[-1].argmax())
        following.append(best + int(tensors["d2t"][best]))
        features = torch.cat([features, outputs[-1:]])
    return following[len(tokens) - 1 :]
