"""The persistent kernel of a decoding step on a GPU: results, bits, other launches between, CUDA graphs, and whole engines."""

from __future__ import annotations

import pytest
import torch
from decode_step_cases import StepCase, compute_plainly, make_layers, make_step
from hf_families import family
from tiny_models import make_model, make_tokenizer
from torch import Tensor

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse import stack
from fa_serve.hf.surgery.fuse.fusion import fuse_layers
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.ops import Norm
from fa_serve.ops.decode_step.layout import StepTile
from fa_serve.ops.decode_step.run import DecodeStack
from fa_serve.ops.decode_step.stacked import StackLayer, StackStep

SIZES = {"hidden": 1024, "intermediate": 3072, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "rotary_dim": 128}
CASES = {
    "one": StepCase(kv_lens=(640,), head_norms=True, layers=4, **SIZES),
    "one key": StepCase(kv_lens=(1,), qkv_bias=True, layers=3, **SIZES),
    "long": StepCase(kv_lens=(5003,), layers=2, **SIZES),
    "two": StepCase(q_lens=(1, 1), kv_lens=(77, 1300), layers=2, **SIZES),
    "eight": StepCase(q_lens=(1,) * 8, kv_lens=(3, 170, 1, 400, 16, 2000, 33, 9), head_norms=True, layers=3, **SIZES),
    "padding": StepCase(q_lens=(1,) * 4, kv_lens=(200, 5, 1, 1), padded=frozenset({2, 3}), layers=2, **SIZES),
    "drafts": StepCase(q_lens=(8,), kv_lens=(600,), head_norms=True, layers=2, **SIZES),
    "several drafts": StepCase(q_lens=(4, 4), kv_lens=(90, 4), layers=2, **SIZES),
    "odd sizes": StepCase(kv_lens=(50,), hidden=200, intermediate=328, num_heads=6, num_kv_heads=2, head_dim=64, rotary_dim=32),
}


def on_gpu(layers: list[StackLayer], step: StackStep) -> tuple[list[StackLayer], StackStep]:
    def moved(value: object) -> object:
        if isinstance(value, Norm):
            return value._replace(weight=value.weight.cuda())
        return value.cuda() if isinstance(value, Tensor) else value

    placed = [StackLayer(*map(moved, layer)) for layer in layers]  # type: ignore[arg-type]
    caches = [(k.cuda(), v.cuda()) for k, v in step.caches]
    return placed, StackStep(*map(moved, step))._replace(caches=caches)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tagged", [False, True], ids=["counters", "words"])
@pytest.mark.parametrize("name", CASES)
def test_layers_are_those_of_a_plain_computation(name: str, tagged: bool, dtype: torch.dtype) -> None:
    """Several calls, each with the bits of the first: nothing depends on who arrives first."""
    case = StepCase(**{**vars(CASES[name]), "dtype": dtype})
    layers = make_layers(case)
    x, step = make_step(case)
    copies = step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches])
    expected = compute_plainly(case, layers, x, copies)
    placed, told = on_gpu(layers, step)
    kernel = DecodeStack(placed, case.options(), tile=StepTile(tagged=tagged))
    assert kernel.refusal(told) is None
    first: Tensor | None = None
    for _ in range(20):
        actual = kernel.compute(x.cuda(), told)
        first = actual if first is None else first
        assert torch.equal(actual, first)
    error = float((first.double().cpu() - expected).norm() / expected.norm())
    assert error < (1e-5 if dtype == torch.float32 else 1.5e-2)
    for (keys, values), (right_keys, right_values) in zip(told.caches, copies.caches, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 6e-2
        for cache, right in ((keys, right_keys), (values, right_values)):
            torch.testing.assert_close(cache.cpu(), right, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    "tile",
    [
        StepTile(tile_bytes=16384),
        StepTile(tile_bytes=65536),
        StepTile(num_warps=4, tile_bytes=16384, block_k=1024),
        StepTile(num_warps=16),
        StepTile(block_keys=32, key_stages=3, ahead_bytes=0),
        StepTile(ahead_bytes=1 << 20),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["one", "eight"])
def test_other_tiles(name: str, tile: StepTile) -> None:
    case = StepCase(**{**vars(CASES[name]), "dtype": torch.bfloat16})
    layers = make_layers(case)
    x, step = make_step(case)
    expected = compute_plainly(case, layers, x, step._replace(caches=[(k.clone(), v.clone()) for k, v in step.caches]))
    placed, told = on_gpu(layers, step)
    actual = DecodeStack(placed, case.options(), tile=tile).compute(x.cuda(), told)
    assert float((actual.double().cpu() - expected).norm() / expected.norm()) < 1.5e-2


def test_graphs_of_several_shapes_share_the_counters_of_a_stack() -> None:
    """Replays in any order, eager calls and launches of single layers between them."""
    one = StepCase(**{**vars(CASES["one"]), "dtype": torch.bfloat16, "layers": 3, "kv_lens": (300,)})
    two = StepCase(**{**vars(one), "q_lens": (1, 1), "kv_lens": (20, 300)})
    layers = make_layers(one)
    calls = []
    kernel: DecodeStack | None = None
    for case in (one, two):
        x, step = make_step(case)
        placed, told = on_gpu(layers, step)
        # a stack belongs to its weights: the second step is computed with those of the first
        kernel = DecodeStack(placed, case.options()) if kernel is None else kernel
        inputs = x.cuda()
        outputs = torch.empty_like(inputs)
        calls.append((kernel, told, inputs, outputs, kernel.compute(inputs.clone(), told).clone()))
    # a table is made by a call that is not captured
    graphs = []
    for stacked, told, inputs, outputs, expected in calls:
        assert torch.equal(stacked.compute(inputs.clone(), told), expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.copy_(stacked.compute(inputs.clone(), told))
        graphs.append((graph, stacked._table_of(told.caches)))
    for turn in range(30):
        which = turn * 7 % 3
        if which < 2:
            calls[which][3].zero_()
            graphs[which][0].replay()
            assert torch.equal(calls[which][3], calls[which][4])
        else:
            stacked, told, inputs, _, expected = calls[1]
            x = inputs.clone()
            for first in range(3):
                stacked.compute(x, told, first=first, count=1)
            assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "granite"])
def test_layers_are_proven(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stack, "STACKS_LAYERS", True)
    model = family(name).build().to("cuda", dtype)
    patch(model)
    fuse_layers(model)
    layers = [module for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]
    with caplog.at_level("INFO", logger="fa_serve.hf"):
        assert stack.stack_layers(model, layers), caplog.text


@pytest.mark.usefixtures("full_float32")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_engines_write_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where two orders of summation seldom meet a tie."""
    answers = []
    prompts = [list(range(5, 5 + length)) for length in (3, 40, 17, 90)]
    for switch in (False, True):
        monkeypatch.setattr(stack, "STACKS_LAYERS", switch)
        config = EngineConfig(device="cuda", dtype="float32", max_num_seqs=4, num_pages=64, seed=0)
        engine = Engine(config, model=make_model(name).cuda(), tokenizer=make_tokenizer())
        fused = [m.forward for m in engine._runner.model.modules() if isinstance(vars(m).get("forward"), FusedLayer)]
        assert fused
        assert all((layer.stack is not None) == switch for layer in fused)
        found = stack.stack_of(engine._runner.model)
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        alone = [output.token_ids for output in engine.generate(prompts[:1], params)]
        answers.append(alone + [output.token_ids for output in engine.generate(prompts, params)])
        if found is not None:
            # steps of one and of four sequences, each computed once and captured once
            assert found.kernel.num_calls >= 4, found.said
        engine.close()
    assert answers[0] == answers[1]
