"""Adapters on a GPU: the kernels against float64, and tokens that are those of peft, in CUDA graphs and while others load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import LoraCase, exact_result, make_case
from peft_adapters import PeftForwards, save_adapter
from rounded_once import dtype_id
from tiny_models import make_model, random_prompts

from fa_serve import ops
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.ops.lora.problem import LoraBatch, LoraWeights

pytestmark = pytest.mark.usefixtures("full_float32")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

CASES = [
    pytest.param(LoraCase((0, 1, -1, 2) * 16, widths=(4096, 1024, 1024), k=4096), id="decoding"),
    pytest.param(LoraCase((1,), widths=(4096, 1024, 1024), k=4096, norm=True), id="one token"),
    pytest.param(LoraCase((2,) * 200 + (-1,) * 9 + (0,) * 300, widths=(14336,), k=4096, block_rows=64), id="prompts"),
    pytest.param(LoraCase((0, 1, 2) * 5, widths=(4096,), k=14336, dora=True, bias=True), id="dora and bias"),
    pytest.param(LoraCase((3, 4, 5, -1) * 4, ranks=(16, 16, 16, 64, 128, 256), widths=(4096,), k=4096), id="large ranks"),
]


def on_gpu(values: tuple[Any, ...]) -> list[Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cuda()
        if isinstance(value, LoraWeights | LoraBatch | ops.Norm):
            return type(value)(*map(moved, value))
        return value

    return [moved(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("case", CASES)
def test_kernels(case: LoraCase, dtype: torch.dtype) -> None:
    given = make_case(case, dtype)
    exact = exact_result(case, *given)
    y, x, weights, batch, norm, bias = on_gpu(given)
    before = y.clone()
    ops.add_lora(y, x, weights, batch, norm=norm, bias=bias)
    untouched = [slot < 0 for slot in case.slots]
    assert torch.equal(y[untouched], before[untouched])
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (4e-6 if dtype == torch.float32 else 2 * eps) * exact.abs().max()
    assert bool(((y.cpu().double() - exact).abs() <= bound).all())
    again = before.clone()
    ops.add_lora(again, x, weights, batch, norm=norm, bias=bias)
    assert torch.equal(again, y), "equal calls have equal bits"


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_tokens_are_those_of_peft(tmp_path, family: str, eager: bool) -> None:
    modules = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]} if family == "qwen3-moe" else {}
    folders = {
        name: save_adapter(tmp_path / name, family, seed=seed, r=4 + 8 * seed, **modules) for seed, name in enumerate("abc")
    }
    config = EngineConfig(device="cuda", num_pages=512, max_num_seqs=16, eager=eager, lora_bytes=1 << 26, max_lora_rank=32)
    engine = Engine(config, model=make_model(family).to("cuda"))
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    peft = PeftForwards(make_model(family), folders)
    prompts = random_prompts(16, longest=40)
    names = ["a", "b", None, "c"] * 4
    for _ in range(2):
        for name, prompt, found in zip(names, prompts, engine.generate(prompts, GREEDY, adapter=names), strict=True):
            assert found.token_ids == peft.choose(name, prompt, found.token_ids), name
    if not eager:
        assert {shape.lora for shape in engine._runner._graphs._replays} == {False, True}
    engine.check_integrity()
    engine.close()


def test_loads_beside_running_requests_mix_nothing_up(tmp_path) -> None:
    """A pool of two adapters serves twelve, while requests of the base run all the time: the copies are behind the steps."""
    folders = {f"a{seed}": save_adapter(tmp_path / str(seed), seed=seed) for seed in range(12)}
    first = Engine(
        EngineConfig(device="cuda", num_pages=512, lora_bytes=1 << 26, max_lora_rank=16), model=make_model().to("cuda")
    )
    page = first.adapters.memory.bytes_per_page
    first.close()
    config = EngineConfig(device="cuda", num_pages=512, max_num_seqs=16, lora_bytes=2 * page, max_lora_rank=16)
    engine = Engine(config, model=make_model().to("cuda"))
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    peft = PeftForwards(make_model(), folders)
    prompts = random_prompts(48, longest=20)
    names = [None if i % 4 == 0 else f"a{i % 12}" for i in range(48)]
    for name, prompt, found in zip(names, prompts, engine.generate(prompts, GREEDY, adapter=names), strict=True):
        assert found.token_ids == peft.choose(name, prompt, found.token_ids), name
    assert engine.adapters.pool.num_loads >= 9
    engine.check_integrity()
    engine.close()
