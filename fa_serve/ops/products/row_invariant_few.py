"""The product of 1 to 8 tokens on Hopper with its norm and gate, bitwise equal to `row_invariant.py` with separate launches, in
Gluon.

`_invariant_linear` needs one launch for the norm before it and another one for the gate behind it, and reads no weights before
the previous kernel has completed. Here one launch does all of that:

- weights: before a program waits for the previous kernel, the copy engine starts to fill a ring in shared memory with rows of
  the weights. There is one program for each multiprocessor, also where there are fewer tiles, and it leaves room for one of the
  next product, whose ring is filled while this one runs. Products of a small model find all of their weights in shared memory;
- the norm: the sum of squares of a row is that of `_rms_norm`, in a tile of the same width and with the same number of warps.
  A program keeps the tokens in shared memory, normalised and in the input's dtype, as if they had been stored;
- the product: a chain of `wgmma … k16` over all of k from zero, with 64 rows (tiles.py). These rows are the tokens, repeated,
  an operand in registers: each thread loads its numbers once for all rows that it repeats;
- the gate: both results are rounded to the input's dtype before the activation, as if they had been stored.

Left out: quantised weights, experts, and weights or input whose rows are not contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.gluon_names import async_load, sync_threads
from fa_serve.launching.launch import Launch, View, launch_options
from fa_serve.launching.sizes import norm_warps, power_of_2
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.tiles import InvariantRowsTile


@dataclass(frozen=True)
class FewRowsVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    n:      outputs; a gated product has weights of 2 * n rows
    k:      columns
    tokens: a power of two, at least the number of tokens
    kind:   of the activation, as in `ACTIVATION_KINDS`
    normed: whether the tokens are normalised
    vector: numbers of a token that a thread loads at once where it sums squares, as Triton chooses for `_rms_norm`
    warps:  of a program
    programs: of a launch
    """

    tile: InvariantRowsTile
    layout: gl.NVMMASharedLayout
    n: int
    k: int
    tokens: int
    gated: bool
    kind: int
    normed: bool
    vector: int
    warps: int
    programs: int

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return -(-self.k // self.tile.block_k)

    @property
    def parts(self) -> int:
        """Blocks of tokens that are loaded at once."""
        turns = -(-self.blocks // 8)
        return -(-self.blocks // turns)

    @property
    def blocks_of_turns(self) -> int:
        """Blocks of tokens that are stored, in whole turns."""
        return -(-self.blocks // self.parts) * self.parts

    @property
    def tiles(self) -> int:
        """Tiles of the output, each of which one program computes."""
        return -(-self.n // self.tile.block_n)

    @property
    def most_blocks(self) -> int:
        """The most blocks of weights that a program reads."""
        return self.blocks * -(-self.tiles // self.programs)

    @property
    def stages(self) -> int:
        return min(self.most_blocks, self.tile.stages)

    @property
    def halves(self) -> int:
        """Products of a program: with the weights of the gates, and with those of what is gated."""
        return 2 if self.gated else 1

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage."""
        return 2 * self.tile.block_k * self.tile.block_n * self.halves

    @property
    def norm_tile(self) -> int:
        """The tile of `_rms_norm`."""
        return power_of_2(self.k)

    @property
    def norm_rows(self) -> int:
        """Tokens whose squares are summed at once, so that a thread has 32 numbers at most."""
        return max(1, min(self.tokens, 1024 * self.warps // self.norm_tile))

    @property
    def norm_layout(self) -> gl.BlockedLayout:
        """For each row, the layout that Triton gives to the tile in `_rms_norm`: the order of the sum depends on it."""
        return gl.BlockedLayout([1, self.vector], [1, 32], [1, self.warps], [1, 0])

    @property
    def filling_layout(self) -> gl.BlockedLayout:
        """Layout in which a block of tokens [tokens, block_k] is stored in shared memory."""
        each = max(1, min(8, self.tokens * self.tile.block_k // (32 * self.warps)))
        lanes = min(32, self.tile.block_k // each)
        warps = min(self.warps, self.tile.block_k // (each * lanes))
        return gl.BlockedLayout([1, each], [32 // lanes, lanes], [self.warps // warps, warps], [1, 0])

    @property
    def product_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of the sums [64, block_n]. With 8 warps, each of two warpgroups has half of the columns."""
        groups = self.warps // 4
        columns = self.tile.block_n // groups
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, groups], instr_shape=[16, columns, 16])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        """Layout of the first operand of a product, [64, block_k]."""
        return gl.DotOperandLayout(operand_index=0, parent=self.product_layout, k_width=2)

    @property
    def repeated_layout(self) -> gl.DistributedLinearLayout:
        """`operand_layout` of [64 / tokens, tokens, block_k]."""

        def bases(*places: tuple[int, int]) -> list[list[int]]:
            return [[row // self.tokens, row % self.tokens, column] for row, column in places]

        columns = [16 << i for i in range((self.tile.block_k // 16).bit_length() - 1)]
        registers = bases((0, 1), (8, 0), (0, 8), *[(0, column) for column in columns])
        lanes = bases((0, 2), (0, 4), (1, 0), (2, 0), (4, 0))
        warps = bases((16, 0), (32, 0), *[(0, 0)] * (self.warps // 8))
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [64 // self.tokens, self.tokens, self.tile.block_k])


class FewRowsArgs(NamedTuple):
    """What the parts of the kernel read: its arguments, and shared memory.

    w:       a tensor descriptor
    ring:    weights, [halves * stages, block_n, block_k]
    full:    a barrier for each stage, which says that its weights are there
    tokens:  [blocks, tokens, block_k], as the product reads them
    factors: of the norm, [tokens]
    count:   how many blocks of weights this program reads
    """

    w: gl.tensor
    x: gl.tensor
    norm: gl.tensor
    rows: gl.tensor
    eps: gl.tensor
    offset: gl.tensor
    stride_x: gl.tensor
    ring: gl.tensor
    full: gl.tensor
    tokens: gl.tensor
    factors: gl.tensor
    count: gl.tensor


@gluon.jit
def _copy_weights(at, args, var: gl.constexpr):
    """Start to copy the block of weights that this program reads as its `at`-th one: those of its tiles follow one another."""
    STAGES: gl.constexpr = var.stages
    stage = at % STAGES
    row = (gl.program_id(0) + at // var.blocks * var.programs) * var.tile.block_n
    column = at % var.blocks * var.tile.block_k
    full = args.full.index(stage)
    mbarrier.expect(full, var.copied_bytes)
    async_load(args.w, [row, column], full, args.ring.index(stage))
    if var.gated:
        async_load(args.w, [var.n + row, column], full, args.ring.index(STAGES + stage))


@gluon.jit
def _find_factors(args, var: gl.constexpr):
    """Store 1 / sqrt(mean(x^2) + eps) of each token, as `norm_factor` computes it."""
    TOKENS: gl.constexpr = var.tokens
    ROWS: gl.constexpr = var.norm_rows
    TILE: gl.constexpr = var.norm_tile
    LAYOUT: gl.constexpr = var.norm_layout
    columns = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT)), 0)
    for first in gl.static_range(0, TOKENS, ROWS):
        rows = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), args.rows - 1)
        places = gl.expand_dims(rows.to(gl.int64) * args.stride_x, 1) + columns
        x = gl.load(args.x + places, mask=columns < var.k, other=0.0).to(gl.float32)
        args.factors.slice(first, ROWS, 0).store(gl.rsqrt(gl.sum(x * x, 1) / var.k + args.eps))


@gluon.jit
def _load_tokens(first, args, var: gl.constexpr):
    """Blocks of columns of the tokens, [tokens, block_k] each, as many as a turn has; zeros behind the last ones."""
    TOKENS: gl.constexpr = var.tokens
    BLOCK_K: gl.constexpr = var.tile.block_k
    LAYOUT: gl.constexpr = var.filling_layout
    PARTS: gl.constexpr = var.parts
    rows = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    columns = first * BLOCK_K + gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT)), 0)
    places = rows.to(gl.int64) * args.stride_x + columns
    loaded = ()
    for part in gl.static_range(PARTS):
        keep = (rows < args.rows) & (columns + part * BLOCK_K < var.k)
        loaded += (gl.load(args.x + (places + part * BLOCK_K), mask=keep, other=0.0),)
    return loaded


@gluon.jit
def _load_norm(first, args, var: gl.constexpr):
    """The same columns of the norm's weight, [1, block_k] each."""
    BLOCK_K: gl.constexpr = var.tile.block_k
    PARTS: gl.constexpr = var.parts
    columns = first * BLOCK_K + gl.expand_dims(gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, var.filling_layout)), 0)
    loaded = ()
    for part in gl.static_range(PARTS):
        at = columns + part * BLOCK_K
        loaded += (gl.load(args.norm + at, mask=at < var.k, other=0.0),)
    return loaded


@gluon.jit
def _store_tokens(first, blocks, weights, args, var: gl.constexpr):
    """Store blocks of tokens, normalised and rounded as `_rms_norm` stores them."""
    PARTS: gl.constexpr = var.parts
    if var.normed:
        factors = gl.expand_dims(args.factors.load(gl.SliceLayout(1, var.filling_layout)), 1)
        for part in gl.static_range(PARTS):
            x = blocks[part]
            weight = weights[part].to(gl.float32) + args.offset
            args.tokens.index(first + part).store((x.to(gl.float32) * factors * weight).to(x.dtype))
    else:
        for part in gl.static_range(PARTS):
            args.tokens.index(first + part).store(blocks[part])


@gluon.jit
def _fill_tokens(weights, args, var: gl.constexpr):
    """Store the tokens in shared memory. `weights`: of the norm, of the blocks of the first turn."""
    BLOCKS: gl.constexpr = var.blocks
    PARTS: gl.constexpr = var.parts
    blocks = _load_tokens(0, args, var)  # before the factors are known
    if var.normed:
        _find_factors(args, var)
    _store_tokens(0, blocks, weights, args, var)
    for first in range(PARTS, BLOCKS, PARTS):
        blocks = _load_tokens(first, args, var)
        if var.normed:
            weights = _load_norm(first, args, var)
        _store_tokens(first, blocks, weights, args, var)


@gluon.jit
def _operand(block, args, var: gl.constexpr):
    """A block of tokens [64, block_k], repeated in registers."""
    BLOCK_K: gl.constexpr = var.tile.block_k
    REPEATS: gl.constexpr = 64 // var.tokens
    x = args.tokens.index(block).load(gl.SliceLayout(0, var.repeated_layout))
    x = gl.expand_dims(x, 0).broadcast_to([REPEATS, var.tokens, BLOCK_K])
    return gl.convert_layout(gl.reshape(x, [64, BLOCK_K]), var.operand_layout, assert_trivial=True)


@gluon.jit
def _multiply_stage(acc, up, x, stage, following, args, var: gl.constexpr):
    """Add the products of a block of tokens with the weights of a stage -> sums, and the block `following` of tokens.

    The next block is loaded while tensor cores multiply this one, which they read from registers. Its registers get new numbers
    only behind the wait: the compiler does not know when tensor cores have read them.
    """
    acc = warpgroup_mma(x, args.ring.index(stage).permute((1, 0)), acc, is_async=True)
    if var.gated:
        up = warpgroup_mma(x, args.ring.index(var.stages + stage).permute((1, 0)), up, is_async=True)
    loaded = _operand(following, args, var)
    if var.gated:
        acc, up, x = warpgroup_mma_wait(0, deps=[acc, up, x])
    else:
        acc, x = warpgroup_mma_wait(0, deps=[acc, x])
    return acc, up, loaded


@gluon.jit
def _sum_products(at, args, var: gl.constexpr):
    """The sums over k of a tile for gates and for what is gated, [64, block_n] each. Without a gate the second is zero.

    at: how many blocks of weights this program has read before
    """
    STAGES: gl.constexpr = var.stages
    BLOCKS: gl.constexpr = var.blocks
    BLOCK_N: gl.constexpr = var.tile.block_n
    SUMS: gl.constexpr = var.product_layout
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout=SUMS)
    up = acc
    x = _operand(0, args, var)
    for block in range(BLOCKS):
        stage = at % STAGES
        mbarrier.wait(args.full.index(stage), (at // STAGES) & 1)
        acc, up, x = _multiply_stage(acc, up, x, stage, gl.minimum(block + 1, BLOCKS - 1), args, var)
        if var.most_blocks > STAGES:
            sync_threads()  # all warps have multiplied this stage
            if at + STAGES < args.count:
                _copy_weights(at + STAGES, args, var)
        at = at + 1
    return acc, up


@gluon.jit
def _load_beside(pointer, first, args, var: gl.constexpr):
    """[64, block_n] of the residual, for a tile whose columns begin at `first`."""
    BLOCK_N: gl.constexpr = var.tile.block_n
    rows = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, var.product_layout)), 1)
    columns = first + gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, var.product_layout)), 0)
    return gl.load(pointer + (rows.to(gl.int64) * var.n + columns), mask=(rows < args.rows) & (columns < var.n), other=0.0)


@gluon.jit
def _compute_tile(tile, at, bias_ptr, residual_ptr, out_ptr, alpha, args, var: gl.constexpr):
    """Compute a tile, add the bias, gate, and store as `store_product` does."""
    BLOCK_N: gl.constexpr = var.tile.block_n
    rows = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, var.product_layout)), 1)
    columns = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, var.product_layout))
    inside = columns < var.n
    if residual_ptr is not None:  # it is loaded while the products are computed
        residual = _load_beside(residual_ptr, tile * BLOCK_N, args, var)
    acc, up = _sum_products(at, args, var)
    if bias_ptr is not None:
        acc = acc + gl.expand_dims(gl.load(bias_ptr + columns, mask=inside, other=0.0).to(gl.float32), 0)
    if var.gated:
        if bias_ptr is not None:
            up = up + gl.expand_dims(gl.load(bias_ptr + var.n + columns, mask=inside, other=0.0).to(gl.float32), 0)
        gate = acc.to(out_ptr.dtype.element_ty).to(gl.float32)
        acc = activate(gate, var.kind) * up.to(out_ptr.dtype.element_ty).to(gl.float32)
    if residual_ptr is not None:
        acc = residual.to(gl.float32) + alpha * acc
    places = rows.to(gl.int64) * var.n + gl.expand_dims(columns, 0)
    gl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=(rows < args.rows) & gl.expand_dims(inside, 0))


@gluon.jit(do_not_specialize=["rows"])
def invariant_rows(
    w_desc,
    x_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    eps,
    offset,
    alpha,
    stride_x,
    var: gl.constexpr,
):
    """A program computes tile after tile: block_n columns of the output for all tokens, of which there are `rows`."""
    STAGES: gl.constexpr = var.stages
    RING: gl.constexpr = STAGES * var.halves
    BLOCK_N: gl.constexpr = var.tile.block_n
    LAYOUT: gl.constexpr = var.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK_K: gl.constexpr = var.tile.block_k
    ring = gl.allocate_shared_memory(w_desc.dtype, [RING, BLOCK_N, BLOCK_K], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    TOKENS: gl.constexpr = var.tokens
    ROOM: gl.constexpr = var.blocks_of_turns
    # eight numbers of a column are at another place in each of 8 tokens, so that they lie in different banks
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tokens = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [ROOM, TOKENS, BLOCK_K], SWIZZLED)
    factors = gl.allocate_shared_memory(gl.float32, [TOKENS], PLAIN)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    sync_threads()
    program = gl.program_id(0)
    args = FewRowsArgs(
        w=w_desc,
        x=x_ptr,
        norm=norm_ptr,
        rows=rows,
        eps=eps,
        offset=offset,
        stride_x=stride_x,
        ring=ring,
        full=full,
        tokens=tokens,
        factors=factors,
        count=(var.tiles - program + var.programs - 1) // var.programs * var.blocks,
    )
    # no kernel of a step writes weights, so they may be read before the previous kernel ends
    for i in range(STAGES):
        if i < args.count:
            _copy_weights(i, args, var)
    weights = ()
    if var.normed:
        weights = _load_norm(0, args, var)
    # the programs of the next kernel start when this one is alone: with the previous one still there, multiprocessors without
    # one of its programs would get two of the next kernel, and these would share what one multiprocessor can read
    wait_for_previous_kernel(True, True)
    if program < var.tiles:
        _fill_tokens(weights, args, var)
    at = program * 0
    while program < var.tiles:
        _compute_tile(program, at, bias_ptr, residual_ptr, out_ptr, alpha, args, var)
        at = at + var.blocks
        program = program + var.programs


def plan_invariant_rows(product: Product, tile: InvariantRowsTile, details: Details) -> Multiply:
    """One launch for up to 8 tokens, of a contiguous weight. Rows of the input may have gaps between them."""
    n = product.outputs
    k = product.k
    stride_x = details.strides[0] if details.strides else k
    vector = gcd(8, stride_x)  # 16 bytes, if each token begins at a multiple of them

    def launch_of(normed: bool) -> Launch:
        warps = norm_warps(power_of_2(k)) if normed else 4
        # with eight warps, each of two warpgroups multiplies half of the columns; fewer than 16 of them would keep tensor
        # cores busy for longer than their weights take to arrive
        block_n = max(tile.block_n, 32 if warps > 4 else 8)
        fitting = tile._replace(block_n=block_n, stages=tile.stages * tile.block_n // block_n)
        assert fitting.stages > 1, "a stage is filled again while the next one is multiplied"
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        kind = ACTIVATION_KINDS[details.activation or "silu"]
        tokens = power_of_2(product.tokens)
        var = FewRowsVariant(fitting, layout, n, k, tokens, product.gated, kind, normed, vector, warps, product.num_sms)
        return Launch(
            invariant_rows,
            product.num_sms,
            varying=(product.tokens, details.eps, details.offset, details.alpha),
            fixed=(var,),
            options={**launch_options(True, warps), "maxnreg": (1 << 15) // (32 * warps)},
            strides=(stride_x,),
            views=(View((product.n, k), (k, 1), (block_n, tile.block_k), layout),),
        )

    launches = {normed: launch_of(normed) for normed in (False, True)}

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        out = x.new_empty(product.tokens, n) if residual is None else residual
        launches[norm_weight is not None]((weight, x, norm_weight, bias, residual, out))
        return out

    return multiply
