"""Token-sparse attention on the GPU: the kernels at DeepSeek V3.2's sizes, CUDA graphs, and the engine."""

from __future__ import annotations

import pytest
import torch
from hf_families import BY_NAME, VOCAB
from selected_keys_cases import PagedQueries, numbers, sparse_reference
from tiny_models import random_prompts

from fa_serve import ops
from fa_serve.backends.hopper.latent.tiles import Ring
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf import patch
from fa_serve.ops.selected_keys.attention import run_sparse_attention, selected_tiles

FAMILIES = ["deepseek-v3.2", "glm-moe-dsa", "a.x-k2", "hy-v4"]
STEP = [(300, 5000), (1, 3000), (1, 17), (2, 2050)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_splits", [0, 1, 5], ids=lambda n: f"splits{n}")
@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v"),
    [
        pytest.param(128, 1, 576, 512, id="latent-128"),
        pytest.param(16, 1, 576, 512, id="latent-16"),
        pytest.param(40, 1, 288, 256, id="latent-256"),
        pytest.param(16, 16, 192, 128, id="one-head-each"),
        pytest.param(32, 4, 128, 128, id="grouped"),
    ],
)
def test_attention_to_slots(
    heads: int, kv_heads: int, dim: int, dim_v: int, queries: int, num_splits: int, dtype: torch.dtype
) -> None:
    step = PagedQueries.of([(1, 3000), (1, 500)], page_size=16, device="cuda")
    k = step.cache(kv_heads, dim, dtype, seed=1)
    v = k[..., :dim_v] if kv_heads == 1 else step.cache(kv_heads, dim_v, dtype, seed=2)
    q = numbers(queries, heads, dim, dtype=dtype, seed=3, device="cuda")
    slots = torch.full((queries, 1000), -1, dtype=torch.int32, device="cuda")
    for row in range(queries - 1):  # the last query has no keys
        count = (1000, 1, 513)[row % 3]
        chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(row))[:count].to("cuda")
        slots[row, -count:] = step.slots_of(0, 3000)[chosen].int()
    sinks = numbers(heads, seed=4, device="cuda") if queries == 3 else None
    out = ops.sparse_attention(q, k, v, slots, softmax_scale=dim**-0.5, sinks=sinks, num_splits=num_splits)
    exact = sparse_reference(q, k, v, slots, dim**-0.5, sinks)
    tolerance = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, atol=tolerance * float(exact.abs().max()), rtol=0.0)
    assert out[-1].eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 5], ids=lambda n: f"splits{n}")
@pytest.mark.parametrize("ring", [Ring(32, 4), Ring(32, 3), Ring(16, 8)], ids=str)
@pytest.mark.parametrize(("heads", "dims"), [(64, (576, 512)), (128, (576, 512)), (64, (288, 256))], ids=str)
def test_the_hopper_kernel_gathers(heads: int, dims: tuple[int, int], ring: Ring, num_splits: int) -> None:
    """Lists of all lengths, many programs on an SM after another, and sinks."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel runs on Hopper only")
    dim, dim_v = dims
    step = PagedQueries.of([(1, 3000), (1, 500)], page_size=16, device="cuda")
    k = step.cache(1, dim, torch.bfloat16, seed=1)
    q = numbers(300, heads, dim, dtype=torch.bfloat16, seed=3, device="cuda")
    slots = torch.full((300, 2048), -1, dtype=torch.int32, device="cuda")
    for row in range(299):  # the last query has no keys
        count = (2048, 1, 513, 2000)[row % 4]
        chosen = torch.randperm(3000, generator=torch.Generator().manual_seed(row))[:count].to("cuda")
        slots[row, -count:] = step.slots_of(0, 3000)[chosen].int()
    sinks = numbers(heads, seed=4, device="cuda") if num_splits > 1 else None
    exact = sparse_reference(q, k, k[..., :dim_v], slots, dim**-0.5, sinks)
    for _ in range(3):
        out = run_sparse_attention(q, k, k[..., :dim_v], slots, sinks, dim**-0.5, num_splits, ring)
        tolerance = 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
        torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=0.0)
        assert out[-1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_choice_of_keys(dtype: torch.dtype) -> None:
    """What is chosen has no smaller score than what is not, but for the rounding of sums."""
    step = PagedQueries.of(STEP, page_size=16, behind=3, device="cuda")
    q = numbers(step.total, 64, 128, dtype=dtype, seed=1, device="cuda")
    weights = numbers(step.total, 64, seed=2, device="cuda")
    cache = step.cache(1, 128, dtype, seed=5)
    slots = ops.select_slots(q, cache, weights, topk=2048, **step.places)
    flat = cache.flatten(0, 1)[:, 0].double()
    row = 0
    for sequence, (queries, keys) in enumerate(STEP):
        for query in range(queries):
            visible = step.slots_of(sequence, keys - queries + query + 1)
            own = slots[row][slots[row] >= 0].long()
            assert len(own.unique()) == len(own) == min(2048, len(visible))
            chosen = torch.isin(visible, own)
            assert int(chosen.sum()) == len(own)
            scores = weights[row].double() @ torch.relu(q[row].double() @ flat[visible].T)
            if not chosen.all():
                assert scores[chosen].min() >= scores[~chosen].max() - 1e-4 * float(scores.abs().max())
            row += 1
    assert slots[row:].eq(-1).all()


def test_lengths_may_change_below_a_captured_graph(no_synchronisation) -> None:
    step = PagedQueries.of([(1, 3000), (1, 2500)], page_size=16, device="cuda")
    latent = step.cache(1, 576, torch.bfloat16, seed=1)
    keys = step.cache(1, 128, torch.bfloat16, seed=2)
    q = numbers(2, 128, 576, dtype=torch.bfloat16, device="cuda")
    index_q = numbers(2, 64, 128, dtype=torch.bfloat16, device="cuda")
    weights = numbers(2, 64, device="cuda")

    def call() -> torch.Tensor:
        slots = ops.select_slots(index_q, keys, weights, topk=2048, **step.places)
        return ops.sparse_attention(q, latent, latent[..., :512], slots, softmax_scale=0.07)

    call()
    with no_synchronisation():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    step.seqused_k.copy_(torch.tensor([2100, 3]))
    graph.replay()
    # the order of the chosen keys is that of sums
    torch.testing.assert_close(out, call(), atol=0.02, rtol=0.02)


def test_other_tiles_compute_the_same() -> None:
    q = numbers(5, 128, 576, dtype=torch.bfloat16, device="cuda")
    latent = numbers(8, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    slots = torch.randperm(512)[:400].int().to("cuda").expand(5, -1).contiguous()
    own = selected_tiles(90, 2, 128, 512, 512)
    found = [
        run_sparse_attention(q, latent, latent[..., :512], slots, None, 0.07, 1, tiles=tiles)
        for tiles in (own, selected_tiles(80, 2, 128, 512, 512), selected_tiles(0, 2, 128, 512, 512))
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0.01, rtol=0.02)


@pytest.mark.parametrize(
    "settings", [{}, {"eager": True}, {"num_pages": 12, "max_model_len": 48, "max_num_batched_tokens": 13}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("full_float32")
def test_tokens_are_those_of_generate(name: str, settings: dict) -> None:
    model = BY_NAME[name].build().to("cuda")
    model.generation_config.eos_token_id = None
    asked = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in random_prompts(4, longest=25)]
    expected = []
    for prompt in asked:
        ids = torch.tensor([prompt], device="cuda")
        expected.append(model.generate(ids, do_sample=False, max_new_tokens=12)[0, len(prompt) :].tolist())
    patch(model)
    served = [model.generate(torch.tensor([p], device="cuda"), do_sample=False, max_new_tokens=12)[0, len(p) :] for p in asked]
    assert [tokens.tolist() for tokens in served] == expected
    engine = Engine(EngineConfig(device="cuda", page_size=4, **({"num_pages": 128} | settings)), model=model)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    assert [c.token_ids for c in engine.generate(asked, params)] == expected
