"""The one-shot all-reduce compiles for every GPU without spills, and its machine code orders memory between GPUs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cross_compile import Kernel, compiling_for, sm90_and
from sampled_cases import ALL, each_nth

from fa_serve.ops import Norm
from fa_serve.ops.collectives.one_shot import launch_all_reduce
from fa_serve.ops.collectives.peer_buffers import MAX_BYTES, MAX_PROGRAMS, MAX_WIDTH, Peers
from fa_serve.ops.collectives.primitives import per_processor

SHAPES = [(1, 4096, 2), (256, 4096, 2), (64, 5120, 4), (1024, 1024, 8), (64, MAX_WIDTH, 8), (5, 300, 3)]
"""Rows, their width, and ranks."""


@cache
def compile_all(target: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[tuple[int, int, int], Kernel]]:
    """For each of SHAPES the shape with the sum alone, with residual and norm, and with both norms.

    A sample has every second shape for other targets than sm90.
    """
    shapes = SHAPES if target == "sm90" else each_nth(2, SHAPES)
    with compiling_for(target) as kernels:
        for rows, width, size in shapes:
            x = torch.zeros(rows, width, dtype=dtype)
            norm = Norm(torch.zeros(width, dtype=dtype), 1e-6)
            calls = torch.zeros(1 + MAX_PROGRAMS, dtype=torch.int64)
            peers = Peers(1, size, torch.zeros(size, dtype=torch.int64), calls, 132)
            launch_all_reduce(x, peers, x)
            launch_all_reduce(x, peers, x, residual=x, before=norm)
            launch_all_reduce(x, peers, x, residual=x, after=norm, before=norm)
    return list(zip([shape for shape in shapes for _ in range(3)], kernels, strict=True))


@pytest.mark.parametrize("target", sm90_and("sm120"))
def test_no_variant_spills(target: str) -> None:
    """But for sm120, where the sum of eight ranks needs a few registers more than two programs share."""
    for shape, kernel in compile_all(target):
        assert kernel.name == "_one_shot_all_reduce"
        assert kernel.spill_bytes <= (32 if target == "sm120" else 0), shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", each_nth(3, ["sm90", "sm80", "sm100"]))
def test_all_programs_fit_on_a_gpu_at_once(target: str, dtype: torch.dtype) -> None:
    """A program that has no room would let the others wait for ever. A multiprocessor has 65,536 registers, 2,048 threads.

    One row in float32 with both norms spills one register, although there are others.
    """
    for (_, width, _), kernel in compile_all(target, dtype):
        threads = 32 * kernel.binary.metadata.num_warps
        together = per_processor(dtype.itemsize << (width - 1).bit_length())
        label = f"{width} numbers, {kernel.registers} registers, {threads} threads"
        assert together * threads <= 2048, label
        assert together * threads * -(-kernel.registers // 8) * 8 <= 65536, label
        assert kernel.spill_bytes <= (8 if dtype == torch.float32 else 0)


def test_flags_order_the_parts() -> None:
    """Written parts, a fence over the system, a flag for each rank; then an acquire, and loads that pass L1 by.

    Disassembling takes half a second: a sample reads the machine code of each shape with both norms, and the PTX of all.
    """
    for number, ((_, _, size), kernel) in enumerate(compile_all("sm90")):
        ptx = kernel.binary.asm["ptx"]
        assert ptx.count("fence.acq_rel.sys") == 1
        assert ptx.count("st.relaxed.sys.global.u64") == size
        assert ptx.count("atom.global.sys.acquire.add.u64") == 1
        assert "multimem" not in ptx
        fence = ptx.index("fence.acq_rel.sys")
        flag = ptx.rindex("st.relaxed.sys.global.u64")
        acquire = ptx.index("atom.global.sys.acquire.add.u64")
        assert ptx.index("st.global") < fence < flag < acquire < ptx.index("ld.global.cg")
        assert "bar.sync" in ptx[ptx.rindex("st.global", 0, fence) : fence]
        assert "bar.sync" in ptx[acquire : ptx.index("ld.global.cg")]
        if number % 3 < 2 and not ALL:
            continue
        sass = kernel.sass
        assert sass.count("MEMBAR") >= 1
        assert sass.count("STG.E.64.STRONG.SYS") == size
        assert sass.count("ATOMG.E.ADD.64.STRONG.SYS") >= 1


def test_aligned_rows_are_read_in_whole_vectors() -> None:
    for (_, width, size), kernel in compile_all("sm90"):
        if width % 8 == 0:
            assert kernel.binary.asm["ptx"].count("ld.global.cg.v4.b32") % size == 0
            assert "ld.global.cg.b16" not in kernel.binary.asm["ptx"]
        assert MAX_BYTES % 16 == 0
