"""Training on a packed batch that has rows behind its last sequence."""

from __future__ import annotations

import torch
from tiny_models import make_model
from torch import Tensor


def packed_training_gradients(device: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """The gradients of a tiny Llama's parameters for two packed sequences of 50 and 40 tokens, with 70 tokens of padding behind
    them and without."""
    ids = torch.randint(1, 200, (1, 160), generator=torch.Generator().manual_seed(2)).to(device)
    positions = torch.cat([torch.arange(n) for n in (50, 40, 70)])[None].to(device)
    starts = torch.tensor([0, 50, 90], dtype=torch.int32, device=device)
    packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 50, "max_length_k": 50}
    found = []
    for tokens in (160, 90):
        model = make_model().to(device, dtype).train()
        model.set_attn_implementation("fa_serve")
        labels = ids[:, :tokens].clone()
        labels[:, 90:] = -100
        given = {"input_ids": ids[:, :tokens], "position_ids": positions[:, :tokens], "labels": labels}
        model(**given, **packed, use_cache=False).loss.backward()
        found.append([p.grad.float() for p in model.parameters()])
    return found
