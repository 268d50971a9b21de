"""`hopper.forward.kernel`, compiled for sm90: the intended instructions are there, and the loops do not spill."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from cross_compile import Kernel, compiling_for, main_loops
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.kernel import Numbers, attn_fwd_hopper
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule, hopper_forward_tiles

CAUSAL = (-1, 0)
FULL = (-1, -1)
# Bytes per thread, outside of the loop, for values that are read once per tile. D192 needs them, and is 6% faster with them.
SPILL_BUDGET = 24
# The same where keys may be split: both warpgroups share more values that the compiler computes ahead of them, such as the
# address of the log-sum-exps and signs of strides. The loops write none; one reads the address of shared memory twice a block.
SPILL_BUDGET_OF_SPLITS = 40
READS_IN_THE_LOOP = 2


@cache
def compile_forward(
    head_dim: int,
    head_dim_v: int,
    window: tuple[int, int],
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    sinks: bool = False,
    seqlen: int = 2048,
    tiles: HopperTiles | None = None,
    page_size: int = 0,
    queries: int = 0,
    heads: tuple[int, int] = (4, 2),
) -> Kernel:
    tensors = AttentionTensors(
        q=torch.zeros(1, queries or seqlen, heads[0], head_dim, dtype=dtype),
        k=torch.zeros(1, seqlen, heads[1], head_dim, dtype=dtype),
        v=torch.zeros(1, seqlen, heads[1], head_dim_v, dtype=dtype),
        sinks=torch.zeros(heads[0], dtype=dtype) if sinks else None,
    )
    max_seqlen_k = seqlen
    if packed or page_size:
        q, k, v = (x[0] for x in tensors[:3])
        cu_seqlens = torch.tensor([0, seqlen], dtype=torch.int32)
        tensors = tensors._replace(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens, keys=cu_seqlens)
    if page_size:
        max_seqlen_k = 4096
        tensors = tensors._replace(
            k=k[: 2 * page_size].unflatten(0, (2, -1)),
            v=v[: 2 * page_size].unflatten(0, (2, -1)),
            block_table=torch.zeros(1, 256, dtype=torch.int32),
            keys=torch.tensor([max_seqlen_k], dtype=torch.int32),
        )
    options = AttentionOptions(0.1, window, softcap, queries or seqlen, max_seqlen_k, return_lse=True)
    with compiling_for("sm90") as kernels:
        plan_hopper_forward(tensors, options, tiles)(tensors)
    names = [kernel.name for kernel in kernels]
    tables = (["_tile_table"], ["_split_table"]) if packed or page_size else ([],)
    assert names in [[*table, "attn_fwd_hopper", *combine] for table in tables for combine in ([], ["combine_splits"])]
    return kernels[names.index("attn_fwd_hopper")]


def test_the_numbers_are_the_kernels_parameters() -> None:
    first = attn_fwd_hopper.arg_names.index("scale")
    numbers = tuple(attn_fwd_hopper.arg_names[first:-1])
    assert numbers[:-4] == Numbers._fields
    assert numbers[-4:] == ("mask_batch", "mask_head", "mask_row", "mask_key"), "the strides of a mask stand behind them"


@pytest.mark.parametrize(
    "options",
    each_nth(
        3,
        [
            pytest.param({"head_dim": 64, "head_dim_v": 64, "window": FULL}, id="d64-full"),
            pytest.param({"head_dim": 64, "head_dim_v": 64, "window": CAUSAL, "seqlen": 512}, id="d64-causal-short"),
            pytest.param({"head_dim": 64, "head_dim_v": 64, "window": CAUSAL, "seqlen": 4096}, id="d64-causal"),
            pytest.param(
                {"head_dim": 64, "head_dim_v": 64, "window": (127, 0), "page_size": 16, "sinks": True}, id="d64-window-pages"
            ),
            pytest.param({"head_dim": 128, "head_dim_v": 128, "window": CAUSAL, "packed": True}, id="d128-causal-packed"),
            pytest.param(
                {
                    "head_dim": 128,
                    "head_dim_v": 128,
                    "window": (500, 0),
                    "softcap": 30.0,
                    "sinks": True,
                    "dtype": torch.float16,
                },
                id="d128-window-softcap-sinks-float16",
            ),
            pytest.param({"head_dim": 128, "head_dim_v": 128, "window": CAUSAL, "seqlen": 64}, id="d128-one-group"),
            pytest.param({"head_dim": 192, "head_dim_v": 128, "window": CAUSAL}, id="d192-causal"),
            pytest.param({"head_dim": 256, "head_dim_v": 256, "window": FULL}, id="d256-full"),
            pytest.param({"head_dim": 256, "head_dim_v": 256, "window": CAUSAL, "softcap": 50.0}, id="d256-softcap"),
            pytest.param({"head_dim": 128, "head_dim_v": 128, "window": CAUSAL, "page_size": 16}, id="d128-pages-of-16"),
            pytest.param({"head_dim": 72, "head_dim_v": 72, "window": FULL}, id="d72-full"),
            pytest.param({"head_dim": 80, "head_dim_v": 80, "window": CAUSAL, "packed": True}, id="d80-causal-packed"),
            pytest.param({"head_dim": 80, "head_dim_v": 80, "window": CAUSAL, "page_size": 16}, id="d80-pages-of-16"),
            pytest.param({"head_dim": 80, "head_dim_v": 80, "window": CAUSAL, "seqlen": 64}, id="d80-one-group"),
            pytest.param({"head_dim": 96, "head_dim_v": 96, "window": (500, 0)}, id="d96-window"),
            pytest.param({"head_dim": 112, "head_dim_v": 112, "window": CAUSAL}, id="d112-causal"),
            pytest.param({"head_dim": 160, "head_dim_v": 160, "window": CAUSAL}, id="d160-causal"),
            pytest.param({"head_dim": 192, "head_dim_v": 192, "window": CAUSAL, "packed": True}, id="d192-dv192-causal-packed"),
            pytest.param({"head_dim": 192, "head_dim_v": 192, "window": CAUSAL, "page_size": 64}, id="d192-dv192-pages-of-64"),
            pytest.param({"head_dim": 224, "head_dim_v": 224, "window": FULL}, id="d224-full"),
            pytest.param({"head_dim": 64, "head_dim_v": 256, "window": FULL}, id="d64-dv256-full"),
            pytest.param({"head_dim": 16, "head_dim_v": 40, "window": CAUSAL}, id="d16-dv40-causal"),
            pytest.param({"head_dim": 256, "head_dim_v": 256, "window": (500, 0), "page_size": 256}, id="d256-pages-of-256"),
        ],
    ),
)
def test_compiles_to_the_intended_instructions(options: dict) -> None:
    tiles = hopper_forward_tiles(
        options["head_dim"],
        options["head_dim_v"],
        options["window"],
        options.get("seqlen", 2048),
        options.get("seqlen", 2048),
        "packed" in options or "page_size" in options,
        "page_size" in options,
    )
    kernel = compile_forward(**options)
    found = kernel.instructions
    assert found["HGMMA"] > 0
    assert found["UTMALDG"] > 0, "K, V and Q must come through the copy engine"
    assert found["UTMASTG"] > 0, "O must leave through the copy engine"
    assert found["HMMA"] == 0
    # scores of a thread; each of its two rows needs one more exponential, for the factor that rescales the output
    scores = 64 * tiles.block_n // 128
    loops = main_loops(kernel.sass, scores + 2)
    assert len(loops) == tiles.groups
    tanhs = [sum("MUFU.TANH" in line for line in loop) for loop in loops]
    assert tanhs == [scores if options.get("softcap") else 0] * tiles.groups
    assert not any("MUFU.RCP" in line for loop in loops for line in loop)
    assert not [line for loop in loops for line in loop if re.match(r"LDL|STL", line)]
    assert kernel.spill_bytes <= SPILL_BUDGET
    assert kernel.wgmma_faults == []
    assert kernel.registers <= tiles.registers[0]
    assert kernel.shared_bytes * tiles.blocks_per_sm <= 232_448
    handed_out = {int(n, 16) for n in re.findall(r"USETMAXREG\S*\s+(?:\S+,\s*)?(0x[0-9a-f]+)", kernel.sass)}
    assert tiles.groups == 1 or tiles.registers[1] - (8 if "page_size" in options else 0) in handed_out


def under_a_product(sass: str) -> list[int]:
    """For each wait that leaves a product running, the number of exponentials before the next wait, in program order."""
    counts = []
    running = False
    for line in sass.splitlines():
        if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            running = wait[1] != "0"
            if running:
                counts.append(0)
        elif running and "MUFU.EX2" in line:
            counts[-1] += 1
    return counts


@pytest.mark.parametrize(
    ("head_dim", "window"),
    each_nth(
        3,
        [*((head_dim, FULL) for head_dim in (64, 96, 128, 160, 256)), *((head_dim, CAUSAL) for head_dim in (80, 64, 192, 128))],
    ),
)
def test_products_run_under_the_softmax(head_dim: int, window: tuple[int, int]) -> None:
    """With `softmax_first`, all exponentials of a key block stand between the issue of P V and the wait for it."""
    tiles = replace(hopper_forward_tiles(head_dim, head_dim, window, 2048, 2048, False), softmax_first=True)
    counts = under_a_product(compile_forward(head_dim, head_dim, window, tiles=tiles).sass)
    scores = 64 * tiles.block_n // 128  # of a thread; the exponentials that rescale its two rows may come later
    assert sum(count >= scores for count in counts) == tiles.groups, counts


def test_without_overlap_no_product_runs_under_the_softmax() -> None:
    serial = compile_forward(128, 128, CAUSAL, tiles=HopperTiles(2, 128, 2, 2, Schedule.DYNAMIC, overlap=False))
    assert not any(under_a_product(serial.sass))


def test_one_machine_code_for_all_lengths() -> None:
    """Lengths, heads, windows and strides are runtime values, so that a serving path does not compile again."""
    codes = set()
    for seqlen, window in ((2048, (-1, 0)), (2047, (-1, 0)), (4000, (-1, 0))):
        codes.add(compile_forward(128, 128, window, seqlen=seqlen).binary.asm["cubin"])
    assert len(codes) == 1


@pytest.mark.parametrize(
    ("head_dim", "heads", "queries", "page_size"),
    each_nth(
        2,
        [
            (128, (32, 8), 16, 16),
            (128, (64, 8), 16, 16),
            (64, (64, 8), 4, 16),
            (96, (32, 8), 8, 32),
            (128, (64, 1), 2, 0),
            (80, (8, 2), 4, 0),
        ],
    ),
    ids=str,
)
def test_heads_that_share_a_tile(head_dim: int, heads: tuple[int, int], queries: int, page_size: int) -> None:
    """Few queries of several heads are copied, multiplied and stored as many queries of one head are."""
    kernel = compile_forward(
        head_dim, head_dim, CAUSAL, heads=heads, queries=queries, page_size=page_size, packed=not page_size, sinks=True
    )
    found = kernel.instructions
    assert min(found["HGMMA"], found["UTMALDG"], found["UTMASTG"]) > 0
    assert kernel.wgmma_faults == []
    assert kernel.spill_bytes <= SPILL_BUDGET_OF_SPLITS
    loops = [loop for block_n in (64, 128) for loop in main_loops(kernel.sass, 64 * block_n // 128 + 2)]
    assert loops
    for loop in loops:
        assert not [line for line in loop if line.startswith("STL")]
        assert len([line for line in loop if line.startswith("LDL")]) <= READS_IN_THE_LOOP
