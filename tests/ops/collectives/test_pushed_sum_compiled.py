"""The kernel of large sums compiles for every GPU without spills, and its machine code orders memory between two GPUs."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from cross_compile import UNLIKE, Kernel, compiling_for
from sampled_cases import ALL, each_nth

from fa_serve.ops import Norm
from fa_serve.ops.collectives.one_shot import launch_all_reduce
from fa_serve.ops.collectives.peer_buffers import MAX_PROGRAMS, MAX_WIDTH, Peers
from fa_serve.ops.collectives.primitives import per_processor

SHAPES = [(8192, 4096), (3001, 333), (2048, 8192), (1024, MAX_WIDTH)]
"""Rows and their width."""


@pytest.fixture(autouse=True)
def unwritten_memory(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


@cache
def compile_all(target: str, dtype: torch.dtype = torch.bfloat16, rank: int = 1) -> list[tuple[int, Kernel]]:
    """For each of SHAPES its width with the sum alone, with residual and norm, and with both norms.

    A sample has every second shape for other targets than sm90.
    """
    shapes = SHAPES if target == "sm90" else each_nth(2, SHAPES)
    with compiling_for(target) as kernels:
        for rows, width in shapes:
            x = torch.empty(rows, width, dtype=dtype)
            norm = Norm(torch.empty(width, dtype=dtype), 1e-6)
            peers = Peers(rank, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 132)
            launch_all_reduce(x, peers, x, pushed=True)
            launch_all_reduce(x, peers, x, residual=x, before=norm, pushed=True)
            launch_all_reduce(x, peers, x, residual=x, after=norm, before=norm, pushed=True)
    return list(zip([width for _, width in shapes for _ in range(3)], kernels, strict=True))


@pytest.mark.parametrize("target", each_nth(3, UNLIKE))
def test_no_variant_spills(target: str) -> None:
    """But for sm120, where rows that are not aligned need a few registers more than two programs share."""
    for width, kernel in compile_all(target):
        assert kernel.name == "_pushed_sum"
        assert kernel.spill_bytes <= (40 if target == "sm120" and width == 333 else 0), width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", each_nth(3, ["sm90", "sm80", "sm100"]))
def test_all_programs_fit_on_a_gpu_at_once(target: str, dtype: torch.dtype) -> None:
    """A program that has no room would let the others wait for ever. A multiprocessor has 65,536 registers, 2,048 threads.

    Only rows of 64 KB with residual and norms spill, up to 80 bytes.
    """
    for width, kernel in compile_all(target, dtype):
        threads = 32 * kernel.binary.metadata.num_warps
        together = per_processor(dtype.itemsize << (width - 1).bit_length())
        label = f"{width} numbers, {kernel.registers} registers, {threads} threads"
        assert together * threads <= 2048, label
        assert together * threads * -(-kernel.registers // 8) * 8 <= 65536, label
        assert together * kernel.shared_bytes <= 64 << 10, label
        assert kernel.spill_bytes <= (80 if dtype == torch.float32 and width == MAX_WIDTH else 0), label


def test_lengths_share_their_machine_code() -> None:
    """A prompt of a new length must not wait for the compiler."""
    with compiling_for("sm90") as kernels:
        for rows in (1000, 1001, 1024, 8192):
            x = torch.empty(rows, 4096, dtype=torch.bfloat16)
            peers = Peers(0, 2, torch.zeros(2, dtype=torch.int64), torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64), 132)
            launch_all_reduce(x, peers, x, residual=x, pushed=True)
    assert len({kernel.binary.hash for kernel in kernels}) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_flags_order_the_parts(rank: int) -> None:
    """Two parts are written ahead and one in each round, each before a fence over the system and its flag.

    In a round come an acquire, the part ahead to the other rank, the part that has arrived, past L1, and its result.
    Disassembling takes half a second: a sample reads the machine code of each shape with both norms, and the PTX of all.
    """
    for number, (width, kernel) in enumerate(compile_all("sm90", rank=rank)):
        ptx = kernel.binary.asm["ptx"]
        fences = [found.start() for found in re.finditer(r"fence\.acq_rel\.sys", ptx)]
        flags = [found.start() for found in re.finditer(r"st\.relaxed\.sys\.global\.u64", ptx)]
        acquires = [found.start() for found in re.finditer(r"atom\.global\.sys\.acquire\.add\.u64", ptx)]
        assert (len(fences), len(flags), len(acquires)) == (3, 3, 1), width
        assert "multimem" not in ptx
        acquire = acquires[0]
        assert fences[0] < flags[0] < fences[1] < flags[1] < acquire < fences[2] < flags[2]
        # written ahead: store, barrier, fence, flag
        before = 0
        for fence, flag in zip(fences[:2], flags[:2], strict=True):
            stored = ptx.rindex("st.global", before, fence)
            assert "bar.sync" in ptx[stored:fence]
            before = flag
        # a round
        loads = [found.start() for found in re.finditer(r"ld\.global\.cg", ptx)]
        stores = [found.start() for found in re.finditer(r"st\.global", ptx) if found.start() > acquire]
        assert acquire < ptx.index("bar.sync", acquire) < stores[0] < loads[0] <= loads[-1] < stores[-1] < fences[2]
        assert "bar.sync" in ptx[stores[-1] : fences[2]]
        if number % 3 < 2 and not ALL:
            continue
        sass = kernel.sass
        assert sass.count("MEMBAR") >= 3
        assert sass.count("STG.E.64.STRONG.SYS") == 3
        assert sass.count("ATOMG.E.ADD.64.STRONG.SYS") >= 1


def test_aligned_rows_are_moved_in_whole_vectors() -> None:
    for width, kernel in compile_all("sm90"):
        if width % 8 == 0:
            ptx = kernel.binary.asm["ptx"]
            assert "ld.global.cg.v4.b32" in ptx
            assert not re.search(r"(ld\.global|ld\.global\.cg|st\.global)\.b16", ptx)
