"""Linear attention on a GPU: every kind in steps and packed, the shapes of models, and no wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from linear_attention_cases import KINDS, Inputs, Kind, joined, of_sequence
from rounded_once import dtype_id, randn
from state_steps import Part, StateSteps

from fa_serve import ops
from fa_serve.ops.linear_attention import fallback, pieces, table
from fa_serve.ops.linear_attention.problem import MatrixInputs, Sequences, TimeSteps

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)


def on_gpu(inputs: Inputs) -> Inputs:
    return {name: x.cuda() for name, x in inputs.items()}


def bound(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Some roundings of the operands of products. Strong gates sum up to -5000 in a piece, whose rounding is 3e-4."""
    return float(expected.abs().max() * (2e-4 + 4 * torch.finfo(dtype).eps))


@every_kind
@every_dtype
def test_steps(kind: Kind, dtype: torch.dtype) -> None:
    """Chunks with states within them, few rows over the end of a page, rejected drafts, beside padding."""
    rows = kind.rows(130, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights), device="cuda")
    done = 0
    for count, dropped, stores in (
        (80, 0, (16, 48)),
        (16, 0, ()),
        (7, 6, ()),
        (1, 0, ()),
        (16, 15, ()),
        (14, 0, ()),
        (3, 0, ()),
    ):
        batch = table.begin([Part(9, 2, padding=True), Part(0, count, dropped, stores), Part(3, 0, padding=True)])
        parts = joined([of_sequence(rows, 0, 2), of_sequence(rows, done, done + count), of_sequence(rows, 0, 2)])
        out = kind.step(on_gpu(parts), on_gpu(weights), table.states, batch).cpu()
        assert (out[2 : 2 + count].double() - expected[done : done + count]).abs().max() <= bound(expected, dtype)
        assert not torch.cat((out[:2], out[2 + count :])).any()
        for position, page in table.sequences[0].kept.items():
            state = kind.page_of(states[position])
            assert (table.states.pages[page].cpu().double() - state).abs().max() <= bound(state, dtype)
        table.end()
        done += count - dropped


@pytest.mark.parametrize("by_channel", [False, True], ids=["delta", "kda"])
def test_single_rows_have_the_bits_of_many(by_channel: bool) -> None:
    """Behind a page, 16 rows in one step, and one by one by the kernel for that, which the convolution lets start early."""
    gate = (32, 128) if by_channel else (32,)
    mixed = randn(32, 2 * 16 * 128 + 32 * 128, dtype=torch.bfloat16, seed=1).cuda()
    weight = randn(mixed.shape[1], 4, dtype=torch.bfloat16, seed=2).cuda()
    g = -torch.rand(32, *gate, generator=torch.Generator().manual_seed(3)).cuda()
    beta = randn(32, 32, dtype=torch.bfloat16, seed=4).sigmoid().cuda()
    found = []
    for counts in ([16, 16], [16] + [1] * 16):
        q, _, v = mixed.split([16 * 128, 16 * 128, 32 * 128], 1)
        q, v = q.unflatten(1, (16, 128)), v.unflatten(1, (32, 128))
        conv = StateSteps(ops.causal_conv1d_state(mixed, weight), device="cuda")
        table = StateSteps(ops.gated_delta_rule_state(q, v, g), device="cuda")
        outs = list[torch.Tensor]()
        for count in counts:
            done = sum(map(len, outs))
            rows = slice(done, done + count)
            parts = [Part(0, count)]
            y = ops.causal_conv1d_paged(mixed[rows], weight, conv.states, conv.begin(parts), activation="silu")
            q, k, v = y.split([16 * 128, 16 * 128, 32 * 128], 1)
            inputs = q.unflatten(1, (16, 128)), k.unflatten(1, (16, 128)), v.unflatten(1, (32, 128)), g[rows], beta[rows]
            outs.append(ops.gated_delta_rule_paged(*inputs, table.states, table.begin(parts), use_qk_l2norm=True))
            conv.end()
            table.end()
        pages = [x.states.pages[x.sequences[0].source] for x in (conv, table)]
        found.append([torch.cat(outs), *pages, *[x[0] for x in table.states.tails]])
    for many, single in zip(*found, strict=True):
        assert torch.isfinite(many).all()
        assert torch.equal(many, single)


@every_kind
@every_dtype
def test_packed_sequences(kind: Kind, dtype: torch.dtype) -> None:
    bounds = [0, 5, 5, 100, 101]
    rows = kind.rows(103, dtype)
    weights = kind.weights(dtype)
    begin = randn(4, *kind.state, dtype=torch.float32, seed=9)
    dense = {name: x[None].cuda() for name, x in rows.items()}
    options = {"initial_state": begin.cuda(), "output_final_state": True, **kind.options}
    bounds_on_gpu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    out, final = kind.dense(**dense, **on_gpu(weights), cu_seqlens=bounds_on_gpu, **options)
    assert final is not None
    begin = begin.to(final.dtype)
    for i, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            assert torch.equal(final[i].cpu(), begin[i])
            continue
        expected, states = kind.exact(of_sequence(rows, first, end), weights, begin[i])
        assert (out[0, first:end].cpu().double() - expected).abs().max() <= bound(expected, dtype)
        assert (final[i].cpu().double() - states[-1]).abs().max() <= bound(states[-1], dtype)


@pytest.mark.parametrize("by_channel", [False, True], ids=["scalar", "channel"])
@pytest.mark.parametrize(("batch", "seqlen"), [(1, 1000), (3, 64), (2, 1), (8, 200)])
def test_heads_of_models(batch: int, seqlen: int, by_channel: bool) -> None:
    """16/32 heads of 128 (Qwen3-Next), or 32 heads with gates by channel (Kimi Linear), against PyTorch in float64. Eight
    sequences have their outputs in the loop on Hopper."""
    torch.manual_seed(0)
    key_heads = 32 if by_channel else 16
    q, k = torch.randn(2, batch, seqlen, key_heads, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(batch, seqlen, 32, 128, device="cuda", dtype=torch.bfloat16)
    g = -torch.rand(batch, seqlen, 32, *([128] if by_channel else []), device="cuda")
    beta = torch.rand(batch, seqlen, 32, device="cuda", dtype=torch.bfloat16)
    out, final = ops.gated_delta_rule(q, k, v, g, beta, use_qk_l2norm=True, output_final_state=True)
    rows = [x.flatten(0, 1).double() for x in (q, k, v, g, beta)]
    inputs = MatrixInputs(*rows, None, None, TimeSteps(), 128**-0.5, True)
    expected, state = fallback.matrix_rule(inputs, Sequences(batch, seqlen), None)
    assert final is not None
    assert (out.flatten(0, 1) - expected).abs().max() <= 0.02 * expected.abs().max()
    assert (final - state).abs().max() <= 0.02 * state.abs().max()


# ptxas takes ten times as long for float32 as for 16 bits, at every size; models of other tests have equal sizes
SIZES_OF_FLOAT32 = ((64, 16), (16, 64), (128, 32))
SIZES_OF_16_BITS = ((16, 16), (32, 32), *SIZES_OF_FLOAT32, (64, 64))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        pytest.param(heads, dtype, id=f"{dtype_id(dtype)}-{heads}")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for heads in (SIZES_OF_FLOAT32 if dtype == torch.float32 else SIZES_OF_16_BITS)
    ],
)
def test_sizes_of_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Two packed sequences with keys that are alike, so that every product of the triangular system counts."""
    dim, dim_v = heads
    torch.manual_seed(0)
    q, k = (torch.randn(2, 100, 2, dim, device="cuda") + 1).to(dtype)
    v = torch.randn(100, 4, dim_v, device="cuda").to(dtype)
    g = -torch.rand(100, 4, device="cuda")
    beta = torch.rand(100, 4, device="cuda").to(dtype)
    bounds = torch.tensor([0, 5, 100], dtype=torch.int32, device="cuda")
    given = [x[None] for x in (q, k, v, g, beta)]
    out, final = ops.gated_delta_rule(*given, use_qk_l2norm=True, output_final_state=True, cu_seqlens=bounds)
    inputs = MatrixInputs(*(x.double() for x in (q, k, v, g, beta)), None, None, TimeSteps(), dim**-0.5, True)
    expected, states = fallback.matrix_rule(inputs, Sequences(1, 100, bounds), None)
    assert final is not None
    assert (out[0] - expected).abs().max() <= 4 * bound(expected, dtype)
    assert (final - states).abs().max() <= 4 * bound(states, dtype)


def test_slabs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over pieces run beside other kernels then; several times, also in a graph."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 5000, 8, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(1, 5000, 16, 128, device="cuda", dtype=torch.bfloat16)
    g = -0.1 * torch.rand(1, 5000, 16, device="cuda")
    beta = torch.rand(1, 5000, 16, device="cuda", dtype=torch.bfloat16)
    call = partial(ops.gated_delta_rule, q, k, v, g, beta, use_qk_l2norm=True, output_final_state=True)
    expected, state = call()
    chosen = table.pieces_tile
    rows = [
        replace(row, tile=lambda asked: chosen(asked)._replace(slabs=4)) if row.name == "pieces" else row
        for row in table.RECURRENCE_KERNELS
    ]
    monkeypatch.setattr(table, "RECURRENCE_KERNELS", tuple(rows))
    monkeypatch.setattr(pieces, "MIN_SLAB", 1)
    for _ in range(10):
        out, final = call()
        assert torch.equal(out, expected)
        assert torch.equal(final, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, final = call()
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(final, state)


@pytest.mark.parametrize("by_channel", [False, True], ids=["scalar", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_gradients_of_the_delta_rule(dtype: torch.dtype, by_channel: bool) -> None:
    """Packed sequences with states, against autograd through PyTorch's form in float64. In bfloat16, heads of Qwen3-Next;
    float32 has those of 64, for which ptxas takes half as long."""
    torch.manual_seed(0)
    dim = 64 if dtype == torch.float32 else 128
    bounds = torch.tensor([0, 200, 200, 205, 400], dtype=torch.int32, device="cuda")
    q, k = torch.randn(2, 400, 4, dim, device="cuda", dtype=dtype)
    v = torch.randn(400, 8, dim, device="cuda", dtype=dtype)
    g = -0.1 * torch.rand(400, 8, *([dim] if by_channel else []), device="cuda")
    beta = torch.rand(400, 8, device="cuda", dtype=dtype)
    begin = torch.randn(4, 8, dim, dim, device="cuda")
    given = [x.requires_grad_() for x in (q.clone(), k.clone(), v, g, beta, begin)]
    dense = [x[None] for x in given[:5]]
    options = {"use_qk_l2norm": True, "output_final_state": True, "cu_seqlens": bounds}
    out, final = ops.gated_delta_rule(*dense, initial_state=begin, **options)
    assert final is not None
    dout = torch.randn_like(out)
    dfinal = torch.randn_like(final)
    actual = torch.autograd.grad((out, final), given, (dout, dfinal))
    exact = [x.detach().double().requires_grad_() for x in given]
    inputs = MatrixInputs(*exact[:5], None, None, TimeSteps(), dim**-0.5, True)
    outputs = fallback.matrix_rule(inputs, Sequences(1, 400, bounds), exact[5])
    wanted = torch.autograd.grad(outputs, exact, (dout[0].double(), dfinal.double()))
    for x, y in zip(actual, wanted, strict=True):
        assert (x - y).norm() <= (1e-4 if dtype == torch.float32 else 0.03) * y.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_gradients_of_convolutions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bounds = torch.tensor([0, 1, 1, 300, 9000], dtype=torch.int32, device="cuda")
    x = torch.randn(9002, 192, device="cuda", dtype=dtype)
    weight = torch.randn(192, 4, device="cuda", dtype=dtype)
    bias = torch.randn(192, device="cuda", dtype=dtype)
    begin = torch.randn(4, 3, 192, device="cuda", dtype=dtype)
    given = [y.requires_grad_() for y in (begin, x, weight, bias)]
    options = {"activation": "silu", "output_final_state": True, "cu_seqlens": bounds}
    out, final = ops.causal_conv1d(x[None], weight, bias, initial_state=begin, **options)
    assert final is not None
    dout = torch.randn_like(out)
    dfinal = torch.randn_like(final)
    actual = torch.autograd.grad((out, final), given, (dout, dfinal))
    exact = [y.detach().double().requires_grad_() for y in given]
    outputs = fallback.convolve_sequences(*exact[1:], "silu", Sequences(1, 9002, bounds), exact[0])
    wanted = torch.autograd.grad(outputs, exact, (dout[0].double(), dfinal.double()))
    for y, z in zip(actual, wanted, strict=True):
        assert (y - z).norm() <= (1e-5 if dtype == torch.float32 else 0.01) * z.norm()


@every_kind
def test_nothing_waits_for_the_device(kind: Kind, no_synchronisation: Callable[[], AbstractContextManager[None]]) -> None:
    """A step, and the functional form of packed sequences, once they are planned."""
    rows = on_gpu(kind.rows(40, torch.bfloat16))
    weights = on_gpu(kind.weights(torch.bfloat16))
    table = StateSteps(kind.spec(rows, weights), device="cuda")
    batch = table.begin([Part(0, 32), Part(1, 8)])
    bounds = torch.tensor([0, 20, 40], dtype=torch.int32, device="cuda")
    dense = {name: x[None] for name, x in rows.items()}
    kind.dense(**dense, **weights, cu_seqlens=bounds, **kind.options)
    kind.step(rows, weights, table.states, batch)
    with no_synchronisation():
        kind.dense(**dense, **weights, cu_seqlens=bounds, **kind.options)
        kind.step(rows, weights, table.states, batch)
