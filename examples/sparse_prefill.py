"""A sparse prefill without training: antidiagonal scores choose the key blocks of each head (XAttention, Xu et al. 2025).

    python examples/sparse_prefill.py                            # the embedded model reads 1,900 tokens of Python
    python examples/sparse_prefill.py --thresholds 0.8 0.95      # the part of the estimated probability that is kept

Most of the probability of a long prompt lies in few blocks. They are found from a cheap estimate: in each square of STRIDE
queries and STRIDE keys, only the sum along the antidiagonal is computed, which is one product of tensors that are STRIDE times
shorter and wider. A softmax turns the estimates into probabilities, and each block of queries keeps its largest blocks until
they hold the threshold. The script runs a model with such lists in every layer and prints, for each threshold, the part of the
causal blocks that is kept, the error of the attention outputs against dense attention on the same inputs, and the bits per
token of the prompt. It works for any causal model of transformers; with a model that was trained on long prompts, fewer blocks
suffice.
"""

import argparse
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import fa_serve
from fa_serve.demo import model_path

BLOCK = 64
STRIDE = 8
TOKENS = 1900  # not a multiple of the block


def antidiagonal_blocks(q: Tensor, k: Tensor, scale: float, threshold: float) -> Tensor:
    """The blocks that each block of queries keeps: bool (batch, num_heads, blocks, blocks).

    q: (batch, seqlen, num_heads, head_dim); k: (batch, seqlen, num_kv_heads, head_dim), with the same seqlen
    """
    batch, seqlen, num_heads, _ = q.shape
    blocks = -(-seqlen // BLOCK)
    padding = (0, 0, 0, 0, 0, blocks * BLOCK - seqlen)
    k = k.repeat_interleave(num_heads // k.shape[2], dim=2)
    q, k = (F.pad(x, padding).transpose(1, 2).unflatten(2, (-1, STRIDE)).float() for x in (q, k))
    # (batch, heads, strips, STRIDE * head_dim): the last query of a strip meets its first key, and so on
    scores = q.flip(3).flatten(3) @ k.flatten(3).transpose(2, 3) * (scale / STRIDE)
    strips = blocks * BLOCK // STRIDE
    future = torch.ones(strips, strips, dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    per_block = BLOCK // STRIDE
    mass = probabilities.view(batch, num_heads, blocks, per_block, blocks, per_block).sum((3, 5)) / per_block
    largest, order = mass.sort(-1, descending=True)
    enough = largest.cumsum(-1) - largest >= threshold  # the blocks before this one hold the threshold already
    keep = torch.zeros_like(enough).scatter(-1, order, ~enough)
    # the block of the queries and the first block, where attention sinks are, are always kept
    causal = torch.ones(blocks, blocks, dtype=torch.bool, device=q.device).tril()
    always = torch.eye(blocks, dtype=torch.bool, device=q.device)
    always[:, 0] = True
    return (keep | always) & causal


class SparsePrefill:
    """An attention function of transformers that chooses blocks, and what it has measured in each layer."""

    def __init__(self) -> None:
        self.threshold = 1.0
        self.kept: list[float] = []
        self.errors: list[float] = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        keep = antidiagonal_blocks(q, k, scaling, self.threshold)
        lists = fa_serve.BlockLists.from_blocks(keep, (BLOCK, BLOCK))
        out = fa_serve.attention(q, k, v, causal=True, softmax_scale=scaling, block_mask=lists)
        dense = fa_serve.attention(q, k, v, causal=True, softmax_scale=scaling)
        blocks = keep.shape[-1]
        self.kept.append(keep.float().mean().item() * blocks * 2 / (blocks + 1))
        self.errors.append(((out - dense).float().norm() / dense.float().norm()).item())
        return out, None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="hub name or folder; default: the embedded model")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.99])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    sparse = SparsePrefill()
    AttentionInterface.register("sparse_prefill", sparse)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="fa_serve").to(device)
    ids = tokenizer(inspect.getsource(argparse), return_tensors="pt", truncation=True, max_length=options.tokens)
    ids = ids.input_ids.to(device)

    def bits_per_token() -> float:
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        return F.cross_entropy(logits, ids[0, 1:]).item() / math.log(2)

    print(f"prompt of {ids.shape[1]} tokens, dense: {bits_per_token():.3f} bits per token")
    model.set_attn_implementation("sparse_prefill")
    for threshold in options.thresholds:
        sparse.threshold = threshold
        sparse.kept.clear()
        sparse.errors.clear()
        bits = bits_per_token()
        kept = sum(sparse.kept) / len(sparse.kept)
        print(
            f"threshold {threshold:.2f}: {kept:4.0%} of the blocks, {bits:.3f} bits per token, error of a layer "
            f"{sum(sparse.errors) / len(sparse.errors):.3f} on average and {max(sparse.errors):.3f} at most"
        )


if __name__ == "__main__":
    main()
