"""The kernels of linear attention for every target: they fit into shared memory, spill little, and reach the tensor cores."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from cross_compile import SHARED_BYTES, TARGETS, Kernel, compiling_for, sm90_and
from sampled_cases import each_nth
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.attention.bench_linear import DECODE_TILES, changed_tile, name_of_change, with_tile
from fa_serve import ops
from fa_serve.ops.deterministic import DeterministicMode
from fa_serve.ops.linear_attention import run
from fa_serve.ops.linear_attention.convolution import _causal_conv, _causal_conv_of_row
from fa_serve.ops.linear_attention.few_rows import _compute_few_rows
from fa_serve.ops.linear_attention.pieces import _pass_states
from fa_serve.ops.linear_attention.problem import FEW_ROWS, StateBatch
from fa_serve.ops.linear_attention.scans import _scan_channels
from fa_serve.ops.linear_attention.tiles import few_rows_tile


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(4, *shape, dtype=torch.bfloat16)


def batch(chunks: int, most_rows: int = FEW_ROWS, even_seqs: int = 1) -> StateBatch:
    ints = torch.zeros(4, dtype=torch.int32)
    table = torch.zeros(chunks, 4, dtype=torch.int32)
    return StateBatch(16, ints, ints, ints.long(), torch.zeros(5, dtype=torch.int32), ints, table, most_rows, even_seqs)


def delta(key_heads: int, heads: int, by_channel: bool, chunks: int, most_rows: int = FEW_ROWS, even_seqs: int = 1) -> None:
    q = bf16(key_heads, 128)
    v = bf16(heads, 128)
    g = torch.zeros(4, heads, 128) if by_channel else torch.zeros(4, heads)
    states = ops.gated_delta_rule_state(q, v, g).allocate(2, 2, 16, "cpu")
    step = batch(chunks, most_rows, even_seqs)
    ops.gated_delta_rule_paged(q, q, v, g, bf16(heads), states, step, use_qk_l2norm=True)


def ssd(heads: int, dim: int, groups: int, size: int, chunks: int, most_rows: int = FEW_ROWS) -> None:
    x = bf16(heads, dim)
    b = bf16(groups, size)
    numbers = torch.zeros(heads)
    states = ops.ssd_state(x, b).allocate(2, 2, 16, "cpu")
    steps = {"dt_bias": numbers, "dt_softplus": True}
    ops.ssd_paged(x, bf16(heads), numbers, b, b, states, batch(chunks, most_rows), d=numbers, **steps)  # type: ignore[arg-type]


def assert_small(found: list[Kernel], target: str, spills: int = 0) -> None:
    assert max(kernel.spill_bytes for kernel in found) <= spills
    assert max(kernel.shared_bytes for kernel in found) <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", sm90_and("gfx942"))
def test_convolutions_and_scans(target: str) -> None:
    """Qwen3-Next's convolution, and on two targets Jamba's scan and the recurrence of RecurrentGemma."""
    with compiling_for(target) as found:
        weight = torch.zeros(8192, 4, dtype=torch.bfloat16)
        states = ops.causal_conv1d_state(bf16(8192), weight).allocate(2, 2, 16, "cpu")
        ops.causal_conv1d_paged(bf16(8192), weight, states, batch(3), activation="silu")
        if target in ("sm90", "gfx942"):
            numbers = torch.zeros(8192)
            inputs = bf16(8192), bf16(8192), torch.zeros(8192, 16), bf16(16), bf16(16)
            states = ops.selective_scan_state(inputs[0], inputs[3]).allocate(2, 2, 16, "cpu")
            ops.selective_scan_paged(*inputs, states, batch(3), d=numbers, z=inputs[0], dt_bias=numbers, dt_softplus=True)
            x = bf16(2560)
            ops.rg_lru_paged(x, torch.zeros(4, 2560), ops.rg_lru_state(x).allocate(2, 2, 16, "cpu"), batch(3))
    names = ["_causal_conv" if target == "gfx942" else "_causal_conv_of_row", "_store_conv_states"]
    assert [kernel.name for kernel in found] == names + ["_scan_channels"] * (len(found) - 2)
    assert_small(found, target)


@pytest.mark.parametrize("target", each_nth(2, ["sm90", "sm80", "gfx942"]))
def test_few_rows(target: str) -> None:
    """Drafts of Qwen3-Next; on Hopper of Kimi Linear and of SSD with a state of 256 as well. What does not fit into the limit
    of registers is used once a row."""
    with compiling_for(target) as found:
        delta(16, 32, False, 0)
        if target == "sm90":
            delta(32, 32, True, 0)
            ssd(128, 64, 1, 256, 0)
    assert {kernel.name for kernel in found} == {"_compute_few_rows"}
    assert_small(found, target, spills=0 if target == "gfx942" else 288)


def test_convolutions_of_single_rows_wait_for_nothing_but_memory() -> None:
    """No thread of theirs waits for another, and the next kernel may start while they run."""
    with compiling_for("sm90") as found:
        weight = torch.zeros(8192, 4, dtype=torch.bfloat16)
        states = ops.causal_conv1d_state(bf16(8192), weight).allocate(2, 2, 16, "cpu")
        ops.causal_conv1d_paged(bf16(8192), weight, states, batch(0), activation="silu")
        ops.causal_conv1d_paged(torch.cat([bf16(8192)] * 129), weight, states, batch(0), activation="silu")
    single, blocks = found
    assert (single.name, blocks.name) == ("_causal_conv_of_row", "_causal_conv")
    assert "BAR.SYNC" not in single.sass
    assert single.programmatic == ["launch_dependents"]
    assert single.registers <= 32, "2,048 threads fit on a multiprocessor"


def test_single_rows() -> None:
    """Decoding on Hopper: four programs fit on a multiprocessor, and three with gates by channel. The state is requested before
    the step waits for the kernel before it, 16 bytes a thread."""
    with compiling_for("sm90") as found:
        delta(16, 32, False, 0, 1)
        ssd(80, 64, 1, 128, 0, 1)
        delta(32, 32, True, 0, 1)
    assert [kernel.name for kernel in found] == ["_compute_few_rows"] * 3
    assert [kernel.registers for kernel in found] == [128, 128, 168]
    for kernel, spills in zip(found, (128, 0, 64), strict=True):
        assert_small([kernel], "sm90", spills)
        assert kernel.programmatic == ["wait"]
        before = kernel.sass.partition("ACQBULK")[0]
        assert before.count("LDG.E.128") >= 16 + 2, "the state, and rows of the tail"
    assert found[0].sass.count("BAR.SYNC") <= 25


@pytest.mark.parametrize("change", [change for change in DECODE_TILES if change], ids=name_of_change)
def test_other_tiles_of_single_rows(change: dict[str, int | None]) -> None:
    """Those that `bench_linear --tune` measures."""
    changed = partial(changed_tile, few_rows_tile, change)
    with with_tile("few_rows", changed), compiling_for("sm90") as found:
        delta(16, 32, False, 0, 1)
    (kernel,) = found
    assert kernel.registers <= (change.get("row_registers") or 255)
    assert_small(found, "sm90", spills=16)


@pytest.mark.parametrize("target", ["sm100", *each_nth(2, ["sm90", "sm80", "gfx942"])])
def test_pieces(target: str) -> None:
    """Prompts of Qwen3-Next, and on Hopper and Blackwell of Kimi Linear; on Hopper all by wgmma. The limit of registers leaves
    up to 128 bytes there, and products of Kimi Linear by mma.sync on Blackwell 368."""
    both = target in ("sm90", "sm100")
    with compiling_for(target) as found:
        delta(16, 32, False, 3)
        if both:
            delta(32, 32, True, 3)
    pieces = [kernel for kernel in found if kernel.name != "_compute_few_rows"]
    gated = ["_prepare_pieces", "_pass_states", "_compute_outputs"]
    one = gated[:2] if target == "sm90" else gated  # the loop of gates by head has the outputs
    assert [kernel.name for kernel in pieces] == ([*one, "_sum_gates", *gated] if both else one)
    assert_small(pieces, target, spills=368 if target == "sm100" else 128)
    if target == "sm90":
        assert all(kernel.instructions["HGMMA"] for kernel in pieces if kernel.name != "_sum_gates")


def test_the_loop_over_pieces() -> None:
    """On Hopper it loads pieces ahead, and both of its products take their first operand from registers, so that the state
    does not go through shared memory."""
    with compiling_for("sm90", until="ttgir", only="_pass_states") as found:
        delta(8, 16, False, 3)
    (loop,) = [kernel for kernel in found if kernel.name == "_pass_states"]
    body = loop.binary.asm["ttgir"].rpartition("scf.for")[2]
    assert body.count("async_copy_global_to_local") >= 5
    first = re.findall(r"warp_group_dot %.* : tensor<64x(?:128|64)xbf16, #ttg.dot_op<{opIdx = 0", body)
    assert len(first) == body.count("warp_group_dot %") == 2


def test_the_loop_over_pieces_of_many_sequences() -> None:
    """On Hopper it computes the outputs, in the shared memory and the registers of one program on a multiprocessor."""
    with compiling_for("sm90", only="_pass_states") as found:
        delta(16, 32, False, 3, even_seqs=8)
        delta(32, 32, True, 3, even_seqs=8)
    assert [kernel.name for kernel in found if kernel.name == "_compute_outputs"] == []
    loops = [kernel for kernel in found if kernel.name == "_pass_states"]
    assert len(loops) == 2
    assert_small(loops, "sm90")
    for loop in loops:
        body = loop.binary.asm["ttgir"].rpartition("scf.for")[2]
        assert body.count("warp_group_dot %") == 4
        assert body.count("async_copy_global_to_local") >= 5


def launched(call: Callable[[], object]) -> list[str]:
    with compiling_for("sm90", until="launch") as found:
        call()
    return [kernel.name for kernel in found]


def test_which_calls_have_their_outputs_in_the_loop() -> None:
    """Of 16 heads by their number of sequences, which deterministic mode must not ask: a row's company follows from it.
    Gradients read the states before the pieces."""
    few = torch.zeros(2, dtype=torch.int32)
    many = torch.zeros(9, dtype=torch.int32)
    names = ["_list_sequences", "_prepare_pieces", "_pass_states", "_compute_outputs"]
    assert launched(partial(packed_rows, few)) == names
    assert launched(partial(packed_rows, many)) == names[:3]
    with DeterministicMode():
        assert launched(partial(packed_rows, many)) == names
    gradients = ["_prepare_gradients", "_pass_gradients", "_finish_gradients"]
    assert launched(lambda: packed_rows(many, True).sum().backward()) == [*names[:3], *names[:3], *gradients]


def packed_rows(bounds: Tensor, with_gradients: bool = False) -> Tensor:
    q, k, v, beta = (bf16(*shape)[None].requires_grad_(with_gradients) for shape in ((8, 128), (8, 128), (16, 128), (16,)))
    out, _ = ops.gated_delta_rule(q, k, v, torch.zeros(1, 4, 16), beta, use_qk_l2norm=True, cu_seqlens=bounds)
    return out


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_gradients(target: str) -> None:
    """Those of Qwen3-Next's layers. The kernel that finishes keeps some numbers outside of registers."""
    names = ("_prepare_gradients", "_pass_gradients", "_finish_gradients", "_conv_weight_gradients", "_conv_input_gradients")
    with compiling_for(target, only="gradients") as found:
        q, k, v, beta = (bf16(*shape)[None].requires_grad_() for shape in ((16, 128), (16, 128), (32, 128), (32,)))
        g = torch.zeros(1, 4, 32)
        bounds = torch.zeros(2, dtype=torch.int32)
        out, _ = ops.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=bounds)
        out.sum().backward()
        x = bf16(8192)[None].requires_grad_()
        out, _ = ops.causal_conv1d(x, torch.zeros(8192, 4, dtype=torch.bfloat16), activation="silu", cu_seqlens=bounds)
        out.sum().backward()
    gradients = [kernel for kernel in found if "gradients" in kernel.name]
    assert tuple(kernel.name for kernel in gradients) == names
    assert_small([kernel for kernel in gradients if kernel.name != "_finish_gradients"], target, spills=16)
    assert_small(gradients, target, spills=256 if target == "sm90" else 512)


@pytest.mark.parametrize("target", ["sm100", *each_nth(4, [target for target in TARGETS if target != "sm100"])])
def test_gradients_of_gates_by_channel(target: str) -> None:
    """Those of Kimi Linear's layers."""
    with compiling_for(target, only="gradients") as found:
        q, k, v, beta = (bf16(*shape)[None].requires_grad_() for shape in ((32, 128), (32, 128), (32, 128), (32,)))
        g = torch.zeros(1, 4, 32, 128, requires_grad=True)
        out, _ = ops.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, cu_seqlens=torch.zeros(2, dtype=torch.int32))
        out.sum().backward()
    gradients = [kernel for kernel in found if "gradients" in kernel.name]
    names = ["_prepare_gradients", "_pass_gradients", "_gradients_of_values", "_gradients_of_channels"]
    assert [kernel.name for kernel in gradients] == names
    print([(target, kernel.name, kernel.spill_bytes) for kernel in gradients])
    assert_small(gradients, target, spills=512 if target.startswith("gfx") else 256)


def test_no_wgmma_of_few_columns() -> None:
    """Keys and values of a few numbers: wgmma of 16 or 32 columns with 4 warps was wrong on Hopper (tiles.py)."""
    with compiling_for("sm90", until="ttgir", only="_prepare_pieces") as found:
        q = bf16(2, 12)
        v = bf16(2, 10)
        g = torch.zeros(4, 2)
        states = ops.gated_delta_rule_state(q, v, g).allocate(2, 2, 16, "cpu")
        ops.gated_delta_rule_paged(q, q, v, g, bf16(2), states, batch(3))
    (prepare,) = [kernel for kernel in found if kernel.name == "_prepare_pieces"]
    shapes = re.findall(r"versionMajor = 3.*instrShape = \[16, (\d+), ", prepare.binary.asm["ttgir"])
    assert set(shapes) == {"64"}


@pytest.mark.parametrize(
    "kernel",
    [_compute_few_rows, _pass_states, _causal_conv, _causal_conv_of_row, _scan_channels],
    ids=lambda x: x.fn.__name__,
)
def test_sizes_of_a_call_are_not_part_of_the_code(kernel: JITFunction) -> None:  # type: ignore[type-arg]
    """`Launch` shares a compiled kernel among calls of other sizes, so that Triton must not specialise it for 1 or for 16."""
    sizes = {"total", "num_seqs", "num_chunks"}
    named = {parameter.name for parameter in kernel.params} & sizes
    assert named
    assert {parameter.name for parameter in kernel.params if parameter.do_not_specialize} == named


@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "fits"),
    [
        (90, 128, torch.float32, True),
        (90, 256, torch.bfloat16, True),
        (90, 256, torch.float32, False),
        (120, 128, torch.bfloat16, True),
        (120, 256, torch.bfloat16, False),
        (89, 128, torch.float32, False),
    ],
    ids=str,
)
def test_gradients_that_do_not_fit_are_those_of_pytorch(
    arch: int, dim: int, dtype: torch.dtype, fits: bool, monkeypatch
) -> None:
    monkeypatch.setattr(run.spec, "arch_of", lambda device: arch)
    given = torch.empty(4, 2, 64, dtype=dtype, device="meta")
    assert run._fit_gradients(dim, given) == fits
