"""The kernels of ops on a GPU, against float64. Each is called three times, because later calls launch in another way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from products_by_kernel import without_kernels
from rounded_once import assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.moe.run import products_of
from fa_serve.ops.products.table import select_kernel
from fa_serve.ops.select import select_ops
from fa_serve.ops.torch_ops import TorchOps
from fa_serve.testing import assert_matches_reference

CALLS = 3
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EXACT = TorchOps()


def inputs(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return randn(*shape, dtype=dtype, seed=seed).cuda()


def exact_norm(norm: ops.Norm | None) -> ops.Norm | None:
    return None if norm is None else norm._replace(weight=norm.weight.double())


def test_a_gpu_is_served_by_kernels() -> None:
    assert ops.select_ops(torch.device("cuda", 0)).name == "triton"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width"), [(1, 64), (300, 4096), (7, 5120)])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_rms_norm(total: int, width: int, residual: bool, dtype: torch.dtype) -> None:
    norm = ops.Norm(inputs(width, dtype=dtype, seed=1), 1e-5, 1.0)
    for seed in range(CALLS):
        x = inputs(total, width + 16, dtype=dtype, seed=seed)[:, :width]
        added = inputs(total, width, dtype=dtype, seed=seed + 9) if residual else None
        exact = EXACT.rms_norm(x.double(), exact_norm(norm), None if added is None else added.double(), None)
        assert_rounded_once(ops.rms_norm(x, norm, residual=added), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width"), [(1, 64), (300, 768), (7, 5120)])
@pytest.mark.parametrize("form", ["plain", "residual", "kept"])
def test_layer_norm(total: int, width: int, form: str, dtype: torch.dtype) -> None:
    bias = None if form == "plain" else inputs(width, dtype=dtype, seed=2)
    norm = ops.LayerNorm(inputs(width, dtype=dtype, seed=1), bias, 1e-5)
    exact = ops.LayerNorm(norm.weight.double(), None if bias is None else bias.double(), 1e-5)
    for seed in range(CALLS):
        x = inputs(total, width + 16, dtype=dtype, seed=seed)[:, :width]
        residual = None if form == "plain" else inputs(total, width, dtype=dtype, seed=seed + 9)
        wide = None if residual is None else residual.double()
        wanted = EXACT.layer_norm(x.double(), exact, wide, form == "kept")
        assert_rounded_once(ops.layer_norm(x, norm, residual=residual, keep_sum=form == "kept"), wanted)
        if residual is not None and wide is not None:
            assert_rounded_once(residual, wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add(dtype: torch.dtype) -> None:
    for seed in range(CALLS):
        x = inputs(33, 3000, dtype=dtype, seed=seed)
        y = inputs(33, 3000, dtype=dtype, seed=seed + 9)
        exact = x.double() + 0.3 * y.double()
        assert_rounded_once(ops.add(x, y, alpha=0.3), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width"), [(1, 2048), (64, 2048), (33, 3000)])
def test_add_gated(total: int, width: int, dtype: torch.dtype) -> None:
    for seed in range(CALLS):
        x, y, shared, rows = (inputs(total, width, dtype=dtype, seed=seed + 9 * n) for n in range(4))
        gate = inputs(width, dtype=dtype, seed=seed + 40) * 0.05
        exact = EXACT.add_gated(x.double(), y.double(), shared.double(), rows.double(), gate.double(), 0.3)
        assert_rounded_once(ops.add_gated(x, y, shared, rows, gate, alpha=0.3), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("repeats", [1, 2])
def test_rotary_tables(repeats: int, dtype: torch.dtype) -> None:
    """The angle is rounded to float32 before its cosine is taken, which far positions show."""
    positions = torch.tensor([0, 1, 17, 4095, 131_071, 1 << 20], device="cuda")
    frequencies = 1e6 ** -(torch.arange(0, 128, 2, device="cuda") / 128)
    angles = (positions[:, None].float() * frequencies).double().repeat(1, repeats)
    for _ in range(CALLS):
        cos, sin = ops.rotary_tables(positions, frequencies, 1.25, dtype, repeats)
        assert_rounded_once(cos, 1.25 * angles.cos())
        assert_rounded_once(sin, 1.25 * angles.sin())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("total", [1, 300])
def test_ungroup_delta_inputs(total: int, dtype: torch.dtype) -> None:
    """The heads of Qwen3-Next."""
    heads = ops.DeltaHeads(16, 128, 32, 128)
    for seed in range(CALLS):
        x = inputs(total, heads.columns + 2 * heads.values, dtype=dtype, seed=seed)
        a_log, dt_bias = (inputs(heads.values, dtype=torch.float32, seed=seed + number) for number in (7, 8))
        qkv, z, g, beta = ops.ungroup_delta_inputs(x, heads, a_log, dt_bias)
        exact = EXACT.ungroup_delta_inputs(x.double(), heads, a_log.double(), dt_bias.double())
        assert torch.equal(qkv.double(), exact[0])
        assert torch.equal(z.double(), exact[1])
        torch.testing.assert_close(g.double(), exact[2], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(beta.double(), exact[3], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_act(activation: str, dtype: torch.dtype) -> None:
    for seed in range(CALLS):
        x = inputs(33, 3000, dtype=dtype, seed=seed)
        assert_rounded_once(ops.act(x, activation), EXACT.act(x.double(), activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    for seed in range(CALLS):
        x = inputs(33, 2 * 3000, dtype=dtype, seed=seed)
        assert_rounded_once(ops.act_and_mul(x, activation), EXACT.act_and_mul(x.double(), activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("n", "k", "norm", "activation", "residual", "bias"),
    [
        pytest.param(6144, 4096, True, None, False, False, id="norm"),
        pytest.param(4096, 14336, False, None, True, False, id="residual"),
        pytest.param(6144, 1024, True, "silu", False, True, id="norm-gated-bias"),
        pytest.param(101, 999, True, None, True, True, id="odd"),
    ],
)
def test_linear_of_one_token(
    n: int, k: int, norm: bool, activation: str | None, residual: bool, bias: bool, dtype: torch.dtype
) -> None:
    weight = inputs(n, k, dtype=dtype, seed=1) / 16
    b = inputs(n, dtype=dtype, seed=2) if bias else None
    given = ops.Norm(inputs(k, dtype=dtype, seed=3), 1e-5) if norm else None
    for seed in range(CALLS):
        x = inputs(1, k, dtype=dtype, seed=seed)
        r = inputs(1, n, dtype=dtype, seed=seed + 9) if residual else None
        exact = EXACT.linear(
            x.double(),
            weight.double(),
            None if b is None else b.double(),
            exact_norm(given),
            activation,
            None if r is None else r.double(),
            0.5,
            None,
        )
        assert_rounded_once(ops.linear(x, weight, b, norm=given, activation=activation, residual=r, alpha=0.5), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "norm"),
    [(32, 8, 128, 128, True), (16, 8, 128, 64, False), (9, 3, 96, 96, True), (4, 1, 256, None, False)],
    ids=["norm-D128", "D128-R64", "norm-D96", "D256-no-rotary"],
)
def test_rotary_store_kv(heads: int, kv_heads: int, dim: int, rotary: int | None, norm: bool, dtype: torch.dtype) -> None:
    total = 40
    q_norm = ops.Norm(inputs(dim, dtype=dtype, seed=4), 1e-6) if norm else None
    k_norm = ops.Norm(inputs(dim, dtype=dtype, seed=5), 1e-6) if norm else None
    for seed in range(CALLS):
        qkv = inputs(total, (heads + 2 * kv_heads) * dim, dtype=dtype, seed=seed)
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:total].cuda()
        slots[1::3] = -1
        cos = sin = None
        if rotary:
            angles = inputs(total, rotary // 2, dtype=torch.float32, seed=seed + 20).repeat(1, 2)
            cos, sin = (x.to(dtype)[:, : rotary // 2] for x in (angles.cos(), angles.sin()))
        k_cache, v_cache = (torch.zeros(4, kv_heads, 16, dim, dtype=dtype, device="cuda").transpose(1, 2) for _ in "kv")
        exact = qkv.double()
        exact_caches = k_cache.double(), v_cache.double()
        wide_cos = None if cos is None else cos.double()
        wide_sin = None if sin is None else sin.double()
        EXACT.rotary_store_kv(
            exact, *exact_caches, slots, heads, wide_cos, wide_sin, exact_norm(q_norm), exact_norm(k_norm), None, None
        )
        ops.rotary_store_kv(qkv, k_cache, v_cache, slots, num_heads=heads, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm)
        assert_rounded_once(qkv, exact)
        assert_rounded_once(k_cache, exact_caches[0])
        assert_rounded_once(v_cache, exact_caches[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize("heads", [16, 128])
def test_rotary_store_latent(heads: int, pairing: ops.Pairing, dtype: torch.dtype) -> None:
    total = 40
    norm = ops.Norm(inputs(512, dtype=dtype, seed=4), 1e-6)
    for seed in range(CALLS):
        q = inputs(total, heads, 192, dtype=dtype, seed=seed)[..., 128:]
        latent = inputs(total, 576, dtype=dtype, seed=seed + 10)
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:total].cuda()
        slots[1::3] = -1
        angles = inputs(total, 32, dtype=torch.float32, seed=seed + 20)
        cos, sin = (x.to(dtype) for x in (angles.cos(), angles.sin()))
        cache = torch.zeros(4, 16, 1, 576, dtype=dtype, device="cuda")
        exact_q = q.double()
        exact_cache = cache.double()
        given = (slots, exact_norm(norm), cos.double(), sin.double(), pairing, None)
        exact_keys = EXACT.rotary_store_latent(exact_q, latent.double(), exact_cache, *given, exact_q)
        keys = ops.rotary_store_latent(q, latent, cache, slots, norm=norm, cos=cos, sin=sin, pairing=pairing, out=q)
        assert_rounded_once(q, exact_q)
        assert_rounded_once(keys, exact_keys)
        assert_rounded_once(cache, exact_cache)


def test_a_float8_cache_of_latent_keys_stores_rounded_and_saturated_numbers() -> None:
    descale = torch.tensor([0.013], device="cuda")
    norm = ops.Norm(torch.ones(512, device="cuda", dtype=torch.bfloat16), 1e-6)
    slots = torch.arange(500, device="cuda")
    for seed in range(CALLS):
        latent = inputs(500, 576, dtype=torch.bfloat16, seed=seed)
        latent[3, 512:] = 1e4
        latent[4, 512:] = -1e4
        angles = inputs(500, 32, dtype=torch.float32, seed=seed + 20)
        cache = torch.zeros(32, 16, 1, 576, device="cuda").to(torch.float8_e4m3fn)
        q = inputs(500, 2, 64, dtype=torch.bfloat16, seed=seed + 10)
        words = {"norm": norm, "cos": angles.cos(), "sin": angles.sin(), "pairing": "neighbours", "descale": descale}
        keys = ops.rotary_store_latent(q, latent, cache, slots, **words, out=q)
        expected = (keys.float() / descale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache.flatten(0, 2)[:500].float(), expected.float())


def test_a_float8_cache_stores_rounded_and_saturated_numbers() -> None:
    k_descale = torch.tensor([0.013, 0.4], device="cuda")
    v_descale = torch.tensor([0.0021, 1.7], device="cuda")
    for seed in range(CALLS):
        qkv = inputs(500, 6, 128, dtype=torch.bfloat16, seed=seed)
        qkv[3, 2:] = 1e4
        qkv[4, 2:] = -1e4
        k = qkv[:, 2:4].clone()
        v = qkv[:, 4:].clone()
        caches = [torch.zeros(32, 16, 2, 128, device="cuda").to(torch.float8_e4m3fn) for _ in "kv"]
        slots = torch.arange(500, device="cuda")
        ops.rotary_store_kv(qkv.flatten(1), *caches, slots, num_heads=2, k_descale=k_descale, v_descale=v_descale)
        for cache, x, descale in ((caches[0], k, k_descale), (caches[1], v, v_descale)):
            expected = (x.float() / descale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(cache.flatten(0, 1)[:500].float(), expected.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rows_of_invariant_ops_do_not_depend_on_their_place_or_number(dtype: torch.dtype) -> None:
    x = inputs(130, 1000, dtype=dtype)
    weight = inputs(1000, 200, dtype=dtype, seed=1).t() / 16
    bias = inputs(200, dtype=dtype, seed=2)
    products = ops.invariant_linear(x, weight, bias)
    sums = ops.invariant_sum(x)
    assert_rounded_once(products, x.double() @ weight.double().t() + bias.double())
    assert_rounded_once(sums, x.double().sum(-1))
    for row in range(130):
        assert torch.equal(ops.invariant_linear(x[row : row + 1], weight, bias), products[row : row + 1])
        assert torch.equal(ops.invariant_sum(x[row : row + 1]), sums[row : row + 1])
    assert torch.equal(ops.invariant_linear(x[7:100], weight, bias), products[7:100])
    assert torch.equal(ops.invariant_sum(x[7:100]), sums[7:100])


GATES = {
    "silu": ops.Gate("silu"),
    "gpt-oss": ops.Gate("silu", interleaved=True, slope=1.702, limit=7.0, offset=1.0),
}


def routed(
    tokens: int, gate: ops.Gate, dtype: torch.dtype, sizes: tuple[int, int, int, int] = (32, 4, 256, 192)
) -> tuple[Tensor, Tensor, Tensor, ops.ExpertWeights]:
    """The arguments of `ops.experts`, with an uneven routing. gpt-oss has transposed weights and biases."""
    num_experts, top_k, hidden, width = sizes
    shapes = ((num_experts, 2 * width, hidden), (num_experts, hidden, width))
    weights = [inputs(*shape, dtype=dtype, seed=i) * shape[2] ** -0.5 for i, shape in enumerate(shapes)]
    biases: list[Tensor | None] = [None, None]
    if gate.interleaved:
        biases = [inputs(*shape[:2], dtype=dtype, seed=2) for shape in shapes]
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    scores = inputs(tokens, num_experts, dtype=torch.float32, seed=3) - torch.arange(num_experts, device="cuda") / 8
    top_k_weights, index = scores.softmax(-1).topk(top_k)
    return (
        inputs(tokens, hidden, dtype=dtype, seed=4),
        index,
        top_k_weights,
        ops.ExpertWeights(weights[0], biases[0], weights[1], biases[1], gate),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("tokens", [1, 2, 16, 200, 2000])
def test_experts(tokens: int, gate: ops.Gate, dtype: torch.dtype) -> None:
    x, index, weights, experts = routed(tokens, gate, dtype)
    wide = ops.ExpertWeights(*[None if w is None else w.double() for w in experts[:-1]], gate)
    exact = EXACT.experts(x.double(), index, weights.double(), wide, False)
    eager = EXACT.experts(x, index, weights, experts, False)
    results = [ops.experts(x, index, weights, experts) for _ in range(CALLS)]
    for out in results:
        assert_matches_reference(out, exact, eager)
        assert torch.equal(out, results[0]), "equal calls have equal bits"


MATRIX_CASES = {
    "halves": (GATES["silu"], False),
    "halves-of-columns": (ops.Gate("gelu_tanh"), True),
    "interleaved": (ops.Gate("silu", interleaved=True), False),
    "gpt-oss": (GATES["gpt-oss"], True),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", MATRIX_CASES)
@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        pytest.param(700, (6, 2, 320, 200), id="odd-columns"),
        pytest.param(1500, (8, 4, 2880, 1472), id="wide"),
        pytest.param(4096, (32, 4, 256, 64), id="one-block"),
    ],
)
def test_many_pairs_of_matrices(tokens: int, sizes: tuple[int, int, int, int], case: str, bias: bool) -> None:
    """Against float64 and the portable kernel. One expert has no pair, one has most, and some pairs are another process's."""
    gate, transposed = MATRIX_CASES[case]
    num_experts, top_k, hidden, width = sizes
    shapes = ((num_experts, 2 * width, hidden), (num_experts, hidden, width))
    weights = [inputs(*shape, dtype=torch.bfloat16, seed=i) * shape[2] ** -0.5 for i, shape in enumerate(shapes)]
    biases = [inputs(*shape[:2], dtype=torch.bfloat16, seed=2) if bias else None for shape in shapes]
    if transposed:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    experts = ops.ExpertWeights(weights[0], biases[0], weights[1], biases[1], gate)
    draw = torch.Generator().manual_seed(tokens)
    index = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=draw)
    index = torch.where(index == 2, 3, index).cuda()
    scores = torch.rand(tokens, top_k, generator=draw).cuda()
    x = inputs(tokens, hidden, dtype=torch.bfloat16, seed=4)
    wide = ops.ExpertWeights(*[None if w is None else w.double() for w in experts[:-1]], gate)
    exact = EXACT.experts(x.double(), index, scores.double(), wide, False)
    eager = EXACT.experts(x, index, scores, experts, False)
    results = [ops.experts(x, index, scores, experts) for _ in range(CALLS)]
    with without_kernels("expert_matrices"):
        portable = ops.experts(x, index, scores, experts)
    for out in results:
        assert_matches_reference(out, exact, eager)
        assert_matches_reference(out, exact, portable)
        assert torch.equal(out, results[0]), "equal calls have equal bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_invariant_experts_have_independent_rows(gate: ops.Gate, dtype: torch.dtype) -> None:
    x, index, weights, experts = routed(130, gate, dtype)
    whole = ops.experts(x, index, weights, experts, invariant=True)
    for rows in (*[slice(row, row + 1) for row in range(130)], slice(7, 100)):
        assert torch.equal(ops.experts(x[rows], index[rows], weights[rows], experts, invariant=True), whole[rows])


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the chain of wgmma is Hopper's")
@pytest.mark.parametrize("sizes", [(16, 4, 1024, 384), (32, 8, 512, 200), (128, 8, 2048, 768)], ids=str)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_rows_of_invariant_experts_have_the_same_bits_in_every_kernel(gate: ops.Gate, sizes: tuple[int, int, int, int]) -> None:
    """What machine code cannot show (tests/ops/moe/test_grouped_compiled.py): the instruction itself, and the gates."""
    num_experts, top_k, _, width = sizes
    tokens = 80 * num_experts // top_k
    x, index, weights, experts = routed(tokens, gate, torch.bfloat16, sizes)
    assert select_kernel(products_of(x, index, experts, True)[0]).kernel.name == "expert_matrices"
    whole = ops.experts(x, index, weights, experts, invariant=True)
    with without_kernels("expert_matrices"):
        assert torch.equal(ops.experts(x, index, weights, experts, invariant=True), whole)
    kept = x.new_empty(tokens, top_k, 2 * width)
    assert torch.equal(select_ops(x.device).experts(x, index, weights, experts, True, kept), whole)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 5), slice(7, 70), slice(tokens // 2)):
        assert torch.equal(ops.experts(x[rows], index[rows], weights[rows], experts, invariant=True), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("num_experts", "router"),
    [
        pytest.param(128, ops.Router(8, renormalise=True), id="qwen3"),
        pytest.param(60, ops.Router(4), id="qwen2"),
        pytest.param(256, ops.Router(8, True, True, 2.5, 8, 4), id="deepseek"),
    ],
)
def test_route(num_experts: int, router: ops.Router, dtype: torch.dtype) -> None:
    for seed in range(CALLS):
        rows = [torch.randperm(num_experts, generator=torch.Generator().manual_seed(9 * seed + i)) for i in range(9)]
        logits = (torch.stack(rows).float() / 32).to("cuda", dtype)  # without ties
        bias = inputs(num_experts, dtype=torch.float32, seed=seed) / 64 if router.sigmoid else None
        exact, chosen = EXACT.route(logits.double(), None if bias is None else bias.double(), router, torch.float64)
        weights, index = ops.route(logits, bias, router, dtype)
        assert torch.equal(index, chosen)
        assert_rounded_once(weights, exact)


def test_a_row_of_logits_that_is_not_finite_has_experts_that_exist() -> None:
    logits = inputs(2, 60, dtype=torch.float32)
    logits[1] = float("nan")
    weights, index = ops.route(logits, None, ops.Router(4, renormalise=True), torch.float32)
    assert torch.isnan(weights[1]).all()
    assert torch.isfinite(weights[0]).all()
    assert bool(((index >= 0) & (index < 60)).all())


@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_experts_replay_in_a_graph_with_another_routing(tokens: int) -> None:
    x, index, weights, experts = routed(tokens, GATES["silu"], torch.bfloat16)
    ops.experts(x, index, weights, experts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.experts(x, index, weights, experts)
    for routing in (index.flip(0), (index + 5) % 32, index * 0 + 3, index * 0 + 32):
        index.copy_(routing)
        graph.replay()
        assert torch.equal(out, ops.experts(x, index, weights, experts))
    assert not out.any(), "no expert has the number 32"


@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_a_row_of_experts_that_is_not_finite_stays_alone(tokens: int) -> None:
    x, index, weights, experts = routed(tokens, GATES["gpt-oss"], torch.bfloat16)
    expected = ops.experts(x, index, weights, experts)
    x[-1] = float("nan")
    out = ops.experts(x, index, weights, experts)
    assert torch.isnan(out[-1]).all()
    assert torch.equal(out[:-1], expected[:-1])


def test_no_op_waits_for_the_device(no_synchronisation: Callable[[], AbstractContextManager[None]]) -> None:
    x = inputs(3, 256, dtype=torch.bfloat16)
    weight = inputs(256, 256, dtype=torch.bfloat16)
    norm = ops.Norm(inputs(256, dtype=torch.bfloat16), 1e-6)
    caches = [torch.zeros(2, 16, 1, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    slots = torch.arange(3, device="cuda")
    _, index, scores, experts = routed(3, GATES["silu"], torch.bfloat16)

    def each() -> None:
        for rows in (1, 3):
            ops.linear(x[:rows], weight, norm=norm, activation="silu")
            ops.rms_norm(x[:rows], norm)
            ops.rotary_store_kv(x[:rows], *caches, slots[:rows], num_heads=2)
            ops.sample_rows(x[:rows])
            ops.invariant_linear(x[:rows], weight, None)
            ops.invariant_sum(x[:rows])
            ops.experts(x[:rows], index[:rows], scores[:rows], experts)
            ops.route(x[:rows], None, ops.Router(4), torch.bfloat16)

    each()
    with no_synchronisation():
        each()
