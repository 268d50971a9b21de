"""Attention for Hopper (sm90) in Gluon: TMA, warp specialisation, wgmma.

forward         a call with dense, packed or paged keys: its plan, its launches, and the kernel, in which a producer warp copies
                to shared memory and consumer warpgroups compute; `pack_gqa` lets the query heads of a KV head share a tile,
                `tile_scheduler` says which tile comes next, and `float8_scales` has the scales of float8 copies
split_kv        keys of long sequences, split among tiles: the device cuts them, and a second kernel combines the splits
block_sparse    lists of key blocks, which the producer walks, and the masks that lists were scanned from
latent          decoding of latent attention (MLA)
backward        the gradients; `dq_accumulator` is the sum of dQ in float32, to which the kernel adds, and `wide` has the
                kernel for heads above 128
descriptors     how the copy engine addresses tensors
shared_memory   allocates what the warps share

A kernel is the function that joins the partitions of its warps. `forward` and `backward.wide` define it in `kernel`. In
`latent` and `backward` it is short, and is defined in `plan`, next to the code that launches it.

Left out: decoding of one query per sequence (except latent attention), 16-bit products with float8 caches, and masks for a few
queries. The portable kernels compute these.

Gluon is Triton's experimental layer and changes with every release. The modules with kernels are therefore imported only when a
call is planned, after `supports` has found a release that they are written for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.float8_copies import cannot_quantize
from fa_serve.backends.hopper.backward.tiles import MAX_HEAD_DIM_OF_GRADIENTS
from fa_serve.backends.hopper.forward.tiles import MAX_HEAD_DIM, MAX_HEAD_DIM_OF_TREE, MIN_FILLED, packs_queries
from fa_serve.backends.hopper.latent.tiles import cannot_decode_latent
from fa_serve.backends.mask_blocks import cannot_scan
from fa_serve.backends.triton.mask_blocks import plan_over_blocks
from fa_serve.launching.plans import Run
from fa_serve.spec import FEW_QUERIES, AttentionSpec, dims, dtype_name

RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")
"""The releases of Triton in whose Gluon the kernel compiles, see `gluon_names`."""

FOLLOWS_TREE = True
"""The switch: whether prompts are computed by this kernel in deterministic mode (see `forward.tree`). On an H200,
tests/gpu/test_tree_gpu.py has found its rows equal to those of the portable kernel in every bit."""

_COMPUTED = frozenset({"softcap", "sinks", "block_mask"})
_DIFFERENTIATED = frozenset({"softcap", "sinks"})


class HopperBackend:
    """The Hopper kernel as a backend of attention."""

    name = "hopper"
    mixed_rows: int | None = None
    differentiable = False

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cuda" or spec.arch != 90:
            got = f"compute capability {spec.arch / 10}" if spec.arch else spec.device
            return f"runs on Hopper (compute capability 9.0) only, got {got}"
        if spec.op == "store_kv" or (spec.op == "tree" and not FOLLOWS_TREE):
            return f"computes attention only, got op {spec.op!r}"
        if not triton.__version__.startswith(RELEASES):
            known = ", ".join(f"{release}x" for release in RELEASES)
            return f"needs the Gluon of Triton {known}, got Triton {triton.__version__}"
        if triton.knobs.runtime.interpret:
            return "cannot run in Triton's interpreter, and TRITON_INTERPRET is set"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"computes float16 and bfloat16, got {dtype_name(spec.dtype)}"
        if spec.layout == "paged" and (reason := _cannot_page(spec)):
            return reason
        if _is_latent_decoding(spec):
            reason = cannot_decode_latent(spec)
            if reason is None or spec.head_dim > MAX_HEAD_DIM:
                return reason
        if spec.op == "decode" and (reason := _cannot_decode(spec)):
            return reason
        if spec.op == "tree" and (reason := _cannot_follow_tree(spec)):
            return reason
        if any(dim % 8 or not 0 < dim <= MAX_HEAD_DIM for dim in (spec.head_dim, spec.head_dim_v)):
            got = dims(spec.head_dim, spec.head_dim_v)
            return f"supports head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, got {got}"
        widest = max(spec.head_dim, spec.head_dim_v)
        if spec.op == "backward" and widest > MAX_HEAD_DIM_OF_GRADIENTS:
            return f"computes gradients for head sizes up to {MAX_HEAD_DIM_OF_GRADIENTS}, got {widest}"
        if spec.mask is not None and (reason := _cannot_mask(spec)):
            return reason
        if options := spec.options_beyond(_COMPUTED):
            return f"does not support {options}, which the call uses"
        if (spec.needs_grad or spec.op == "backward") and (options := spec.options_beyond(_DIFFERENTIATED)):
            return f"has no backward pass for {options}, and an input requires gradients"
        if spec.precision != "bf16" and (reason := cannot_quantize(spec)):
            return reason
        if spec.layout == "paged" and spec.needs_grad:
            return "has no backward pass through a paged cache, and an input requires gradients"
        if spec.op == "backward" and spec.deterministic:
            return (
                "accumulates the gradient of q in a varying order, so it cannot give the deterministic gradients that the call "
                "asks for"
            )
        return None

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions) -> Run:
        """As in `backends.Backend`. Any strides and addresses are allowed; each call copies tensors that TMA cannot address."""
        if spec.op == "backward":
            from fa_serve.backends.hopper.backward.plan import plan_hopper_backward

            return plan_hopper_backward(tensors, options)
        if _is_latent_decoding(spec) and cannot_decode_latent(spec) is None:
            from fa_serve.backends.hopper.latent.plan import plan_latent_decode

            return plan_latent_decode(tensors, options)
        from fa_serve.backends.hopper.forward.plan import plan_hopper_forward

        if spec.mask is not None:
            return plan_over_blocks(plan_hopper_forward, tensors, options)
        return plan_hopper_forward(tensors, options)


def _is_latent_decoding(spec: AttentionSpec) -> bool:
    """Whether a call decodes keys whose first numbers are their values."""
    return spec.op == "decode" and spec.layout == "paged" and spec.values_in_keys and not spec.needs_grad


def _cannot_decode(spec: AttentionSpec) -> str | None:
    """Why a few queries per sequence are left to the decoding kernel, or None."""
    if spec.layout != "paged" or spec.sizes is None:
        return (
            f"decodes 2 to {FEW_QUERIES} queries per sequence of a paged cache and chooses the splits itself; "
            "the portable kernel serves one query and a given num_splits"
        )
    sizes = (spec.head_dim, spec.head_dim_v)
    if packs_queries(*sizes, spec.num_heads // spec.num_kv_heads, spec.num_kv_heads, *spec.sizes):
        return None
    batch, queries, keys = spec.sizes
    return (
        f"computes 2 to {FEW_QUERIES} queries per sequence with heads of up to 128 only if their tiles fill about half of "
        f"the GPU, got heads of {max(sizes)}, {batch} sequence{'s' * (batch != 1)} of up to {queries} queries and {keys} keys"
    )


def _cannot_follow_tree(spec: AttentionSpec) -> str | None:
    """Why a call in deterministic mode is left to the portable kernel, or None. Both compute the same bits."""
    if spec.block_mask:
        return "computes num_splits=-1 (deterministic mode) only without a block_mask"
    widest = max(spec.head_dim, spec.head_dim_v)
    if widest > MAX_HEAD_DIM_OF_TREE or spec.softcap:
        got = "softcap" if spec.softcap else f"{widest}"
        return (
            f"computes num_splits=-1 (deterministic mode) only for head sizes up to {MAX_HEAD_DIM_OF_TREE} without softcap, "
            f"got {got}"
        )
    batch, queries, keys = spec.sizes or (0, 0, 0)
    tiles = batch * spec.num_heads * -(-queries // 128)
    if queries >= 128 and (keys <= 2 * queries or tiles >= MIN_FILLED * 132):
        return None
    return (
        "computes num_splits=-1 (deterministic mode) only for prompts whose tiles of 128 queries fill about half of the GPU, "
        f"got {batch} sequence{'s' * (batch != 1)} of up to {queries} queries and {keys} keys"
    )


def _cannot_mask(spec: AttentionSpec) -> str | None:
    """Why an explicit mask is left to another kernel, or None."""
    if spec.op == "backward":
        return f"computes gradients for causal calls and windows, but not for an explicit mask, got a {spec.mask} mask"
    if spec.precision != "bf16":
        return f"multiplies float8 only without an explicit mask, got a {spec.mask} mask"
    return cannot_scan(spec)


def _cannot_page(spec: AttentionSpec) -> str | None:
    """Why the paged cache cannot be read, or None. The kernel that makes float8 copies can read every paged cache."""
    if spec.precision != "bf16":
        return None
    if spec.kv_dtype != spec.dtype:
        return f"reads caches of q's dtype {dtype_name(spec.dtype)}, got {dtype_name(spec.kv_dtype)}"
    if spec.page_size % 16:
        return f"reads pages whose size is a multiple of 16 tokens, got {spec.page_size}"
    if not spec.whole_rows:
        return (
            "reads caches whose address and whose strides of tokens and heads are multiples of 16 bytes, and whose page stride "
            "is a multiple of the token stride, with fewer than 2^31 tokens in all"
        )
    return None
