"""Rollouts on a GPU: the bits of the training forward, a step under CUDA graphs, memory, and tiles of the invariant product."""

from __future__ import annotations

import gc

import pytest
import torch
from padded_rollouts import Batch
from tiny_models import SIZES, greedy, make_model
from transformers import AutoModelForCausalLM, LlamaConfig

import fa_serve
from benchmarks.tuning.tune_few_rows import SHAPES, Layer, unequal_products
from benchmarks.tuning.tune_invariant import call_of, tiles_for, unequal_rows
from fa_serve.engine import RolloutEngine, SamplingParams
from fa_serve.ops.products.tiles import HOPPER_TILES

GPU = {"device": "cuda", "page_size": 16, "num_pages": 256, "max_model_len": 256}
PROMPT = [*range(5, 25)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-moe", "qwen2-moe", "gemma3"])
def test_log_probabilities_are_those_of_the_rollout_in_every_bit(family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to("cuda", dtype).train()
    batch = Batch(model, longest=90, answer=40, **GPU, max_num_batched_tokens=50)
    with fa_serve.exact(model):
        logprobs = batch.compute(model)
    assert (logprobs - batch.logprobs).abs().max() == 0
    logprobs.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.model.layers.parameters())


def test_graphs_see_a_step_in_place_and_are_captured_again_for_other_memory() -> None:
    model = make_model().to("cuda")
    engine = RolloutEngine(model, **GPU, max_num_seqs=8)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    before = engine.generate([PROMPT], params=params)[0].rollouts[0].token_ids
    graphs = engine._engine._runner._graphs
    assert graphs is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    engine.update()
    after = engine.generate([PROMPT], params=params)[0].rollouts[0].token_ids
    assert after == greedy(model, PROMPT, 12) != before
    assert engine._engine._runner._graphs is graphs
    for parameter in model.parameters():
        parameter.data = parameter.data.neg()
    engine.update()
    assert engine.generate([PROMPT], params=params)[0].rollouts[0].token_ids == greedy(model, PROMPT, 12)


def test_a_step_takes_no_memory_and_sleep_gives_the_cache_back() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"hidden_size": 512, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 8})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    alone = torch.cuda.memory_allocated()
    engine = RolloutEngine(model, device="cuda", num_pages=4096, max_model_len=256, max_num_seqs=8)
    cache = sum(k.nbytes + v.nbytes for k, v in engine._engine._runner.kv_caches.values())
    engine.generate([PROMPT], params=SamplingParams(max_tokens=4))
    torch._C._cuda_clearCublasWorkspaces()  # they are larger than the weights of this model
    held = torch.cuda.memory_allocated() - alone - cache
    assert held < weights / 2, "merged weights take the memory of the separate ones"
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.update()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    engine.sleep()
    assert torch.cuda.memory_allocated() <= before - cache
    engine.wake_up()
    assert len(engine.generate([PROMPT], params=SamplingParams(max_tokens=4))[0].rollouts[0].token_ids) == 4


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the chain of wgmma is Hopper's")
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1024, 4096), (4096, 14336), (28672, 4096), (1000, 520)])
def test_a_row_has_the_same_bits_in_every_tile(n: int, k: int) -> None:
    """What machine code cannot show (tests/ops/products/test_row_invariant_compiled.py): the instruction itself."""
    torch.manual_seed(0)
    x = torch.randn(333, k, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    assert unequal_rows(x, weight, list(tiles_for(len(x)))) == []
    exact = x.double() @ weight.double().t()
    error = (call_of(x, weight, next(tiles_for(len(x))))().double() - exact).abs()
    assert error.max() <= 2**-8 * exact.abs().max()


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the chain of wgmma is Hopper's")
def test_another_number_of_segments_changes_bits() -> None:
    """The guard of the rule that segments belong to the product, and not to the number of rows."""
    torch.manual_seed(0)
    x = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    tiles = [HOPPER_TILES[-1]._replace(segments=segments) for segments in (1, 4)]
    assert unequal_rows(x, weight, tiles) != []


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("shape", ["qwen06", "llama8b"])
def test_few_rows_in_one_launch_have_the_bits_of_separate_launches(shape: str, tokens: int) -> None:
    """Norms, gates and residuals included; and the first of them alone."""
    assert not unequal_products(Layer(SHAPES[shape]), tokens)
