"""A paged batch in which some sequences decode and others are in their prompt, each served by the kernel made for it.

The lengths are on the device, so both kernels get the whole batch. The decoding kernel takes the sequences whose packed queries
fill at most one of its shortest tiles, the forward kernel takes the longer ones, and each kernel skips the sequences of the
other. They write disjoint rows of the same output, one after the other on the caller's stream; the decoding kernel also clears
the rows past the last sequence. `fa_serve.dispatch` decides which batches are mixed. This module leaves out running both
kernels at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fa_serve.backends import ATTENTION, Backend
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.launching.plans import Run
from fa_serve.spec import AttentionSpec, Op


def find_decoder(spec: AttentionSpec, name: str) -> Backend | None:
    """The fastest backend whose decoding kernel serves a part of a mixed batch; None if the forward kernel takes all of it.

    spec: the spec of the sequences that decode, with the op "decode" or "tree"
    name: the backend that the call names, or "auto"
    """
    for candidate in ATTENTION.auto if name == "auto" else (name,):
        backend = ATTENTION.load(candidate)
        if not isinstance(backend, str) and backend.mixed_rows is not None and backend.supports(spec) is None:
            return backend
    return None


def plan_mixed(
    decoder: Backend, forward: Backend, spec: AttentionSpec, tensors: AttentionTensors, options: AttentionOptions
) -> Run:
    """Plan paged calls that look like this one and that have no fixed number of splits.

    decoder: the backend that serves the sequences that decode, in q's dtype: by the op "tree" if the spec has that op, else by
             the op "decode". Its `mixed_rows` is not None
    forward: the backend that serves the spec, with the option `skip_q`, by which it skips the sequences of the decoder
    """
    total_q, num_heads, _ = tensors.q.shape
    assert decoder.mixed_rows is not None
    few_queries = max(1, decoder.mixed_rows // (num_heads // tensors.k.shape[2]))
    out_shape = (total_q, num_heads, tensors.v.shape[3])
    lse_shape = (num_heads, total_q)
    takes_out = tensors.out is not None and tensors.out.stride(2) == 1

    def prepare(tensors: AttentionTensors) -> AttentionTensors:
        """Allocate what both kernels write."""
        q = tensors.q if tensors.q.stride(2) == 1 else tensors.q.contiguous()
        out = tensors.out if takes_out else q.new_empty(out_shape)
        lse = q.new_empty(lse_shape, dtype=torch.float32) if options.return_lse else None
        return tensors._replace(q=q, out=out, lse=lse)

    example = prepare(tensors)
    long = forward.plan(spec, example, replace(options, skip_q=few_queries))
    decode_options = replace(options, max_seqlen_q=few_queries, precision="bf16")
    op: Op = "tree" if spec.op == "tree" else "decode"
    short = decoder.plan(replace(spec, op=op, precision="bf16"), example, decode_options)

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        shared = prepare(tensors)
        long(shared)
        short(shared)
        out = shared.out
        assert out is not None
        if tensors.out is not None and out is not tensors.out:
            out = tensors.out.copy_(out)
        return out, shared.lse

    return run
