"""Adapters on a GPU: the kernels against float64, and tokens that are those of peft, in CUDA graphs and while others load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from generated_hybrids import model_of
from lora_cases import LoraCase, base_weight, choose_ahead, exact_product, exact_result, make_case, merged_product
from peft_adapters import PeftForwards, assert_bfloat16_logits, save_adapter
from rounded_once import dtype_id
from tiny_models import make_model, random_prompts

from fa_serve import ops
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.ops.lora import run
from fa_serve.ops.lora.problem import LoraBatch, LoraWeights

pytestmark = pytest.mark.usefixtures("full_float32")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

CASES = [
    pytest.param(LoraCase((0, 1, -1, 2) * 16, widths=(4096, 1024, 1024), k=4096), id="decoding"),
    pytest.param(LoraCase((1,), widths=(4096, 1024, 1024), k=4096, norm=True), id="one token"),
    pytest.param(LoraCase((2,) * 200 + (-1,) * 9 + (0,) * 300, widths=(14336,), k=4096, block_rows=64), id="prompts"),
    pytest.param(LoraCase((0, 1, 2) * 5, widths=(4096,), k=14336, dora=True, bias=True), id="dora and bias"),
    pytest.param(LoraCase((3, 4, 5, -1) * 4, ranks=(16, 16, 16, 64, 128, 256), widths=(4096,), k=4096), id="large ranks"),
    pytest.param(LoraCase((0, 1, -1, 2) * 16, widths=(8192, 4096, 32, 32), k=4096, norm=True), id="a gated delta net"),
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


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid", "lfm2"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_models_that_keep_states(tmp_path, family: str, eager: bool) -> None:
    """In every linear layer, mixers included; in chunks, and then from states and pages that are cached."""
    base = model_of(family)
    layers = {name.rsplit(".")[-1] for name, part in base.get_decoder().named_modules() if type(part) is torch.nn.Linear}
    folders = {
        name: save_adapter(tmp_path / name, model=copy.deepcopy(base), seed=seed, r=4 + 8 * seed, target_modules=[*layers])
        for seed, name in enumerate("abc")
    }
    settings = {"num_pages": 512, "num_states": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 96}
    config = EngineConfig(device="cuda", eager=eager, lora_bytes=1 << 26, max_lora_rank=32, **settings)
    engine = Engine(config, model=copy.deepcopy(base).to("cuda"))
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    peft = PeftForwards(copy.deepcopy(base), folders)
    given = random_prompts(16, longest=40)
    names = ["a", "b", None, "c"] * 4
    for _ in range(2):
        for name, prompt, found in zip(names, given, engine.generate(given, GREEDY, adapter=names), strict=True):
            assert found.token_ids == peft.choose(name, prompt, found.token_ids), name
    engine.check_integrity()
    engine.close()


PRODUCTS = [
    pytest.param(LoraCase((0, 1, -1, 2) * 16, widths=(4096, 1024, 1024), k=4096), {}, id="64 tokens"),
    pytest.param(LoraCase((1,) * 64, widths=(2048, 2048), k=1024), {"activation": "silu"}, id="gate"),
    pytest.param(LoraCase(tuple(range(32)) * 2, (16,) * 32, (4096,), 14336), {"residual": True}, id="32 adapters"),
    pytest.param(LoraCase((-1, 5) * 40, (16,) * 5 + (64,), (1024,), 1024, bias=True), {"residual": True}, id="large ranks"),
    pytest.param(LoraCase((-1, 0, 2, 2) * 4, dora=True, bias=True, widths=(4096,), k=4096), {}, id="dora and bias"),
    pytest.param(LoraCase((1,), widths=(4096, 1024, 1024), k=4096, norm=True), {}, id="one token"),
    pytest.param(LoraCase((1,), widths=(14336, 14336), k=4096, norm=True), {"activation": "silu"}, id="one token, gate"),
    pytest.param(LoraCase((2,), widths=(4096,), k=14336), {"residual": True}, id="one token, residual"),
    pytest.param(LoraCase((-1,), widths=(4096,), k=4096, norm=True), {}, id="one token of the base"),
    pytest.param(LoraCase((0, 1, -1, 2) * 4, widths=(8192, 4096, 32, 32), k=4096), {}, id="a gated delta net"),
    pytest.param(LoraCase((2,), widths=(8192, 4096, 32, 32), k=4096, norm=True), {}, id="one token, a gated delta net"),
]


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT)


@pytest.fixture(params=[False, True], ids=["one_launch", "ahead"])
def a_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ahead(monkeypatch, request.param)


class Problem:
    """A product with adapters on the GPU."""

    def __init__(self, case: LoraCase, extras: dict[str, Any], dtype: torch.dtype) -> None:
        self.case = case
        self.extras = extras
        self.given = make_case(case, dtype)
        self.weight = base_weight(case, dtype)
        self.moved = on_gpu((*self.given, self.weight))

    def compute(self) -> torch.Tensor:
        *given, weight = self.moved
        return merged_product(self.case, tuple(given), weight, self.extras)

    def exact(self) -> torch.Tensor:
        alpha = 0.5 if "residual" in self.extras else None
        return exact_product(self.case, *self.given, self.weight, self.extras.get("activation"), alpha)


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize(("case", "extras"), PRODUCTS)
def test_one_launch_is_exact(
    case: LoraCase, extras: dict[str, Any], dtype: torch.dtype, a_ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, and no further from it than separate launches, which round the product before adapters are added."""
    problem = Problem(case, extras, dtype)
    exact = problem.exact()
    monkeypatch.setattr(run, "MERGED_PRODUCTS", frozenset())
    separate = problem.compute().cpu().double()
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT)
    found = problem.compute().cpu().double()
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (8e-6 if dtype == torch.float32 else 2 * eps) * exact.abs().max()
    assert bool(((found - exact).abs() <= bound).all())
    if dtype == torch.bfloat16:
        assert float((found - exact).abs().max()) <= 1.5 * float((separate - exact).abs().max()) + eps
    assert torch.equal(problem.compute().cpu().double(), found), "equal calls have equal bits"


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(("case", "extras"), PRODUCTS)
def test_one_launch_has_equal_bits_in_graphs(case: LoraCase, extras: dict[str, Any], one_launch: None, a_ahead: None) -> None:
    """1,000 replays of a graph whose calls follow each other without a gap. A program that read what an earlier call left
    would be seen, because the input changes; one that waits for ever ends the test run."""
    problem = Problem(case, extras, torch.bfloat16)
    x = problem.moved[1]
    inputs = [x.clone(), x.flip(1).contiguous()]
    expected = []
    for each in inputs:
        x.copy_(each)
        expected.append(problem.compute().clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = []
        for each in (*inputs, *inputs):
            x.copy_(each)
            outputs += [problem.compute(), problem.compute()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph.replay()
        for index, found in enumerate(outputs):
            wrong += (found != expected[index // 2 % 2]).sum()
    assert int(wrong) == 0


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
def test_one_launch_has_the_tokens_of_peft(tmp_path, family: str, one_launch: None, a_ahead: None) -> None:
    test_tokens_are_those_of_peft(tmp_path, family, eager=False)


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("merged", [False, True], ids=["separate", "one_launch"])
def test_bfloat16_by_the_rule_of_two(tmp_path, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT if merged else frozenset())
    assert_bfloat16_logits(tmp_path, "cuda", requests=16)
    assert_bfloat16_logits(tmp_path, "cuda", requests=1)


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
