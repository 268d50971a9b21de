"""No request launches a kernel that the warm-up has not met, whatever it asks for: seen on a CPU, by what Triton would compile.

tests/gpu/test_late_compilations_gpu.py holds the same on a GPU, where kernels are compiled.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from counted_launches import CountedLaunches, counted_launches
from generated_hybrids import model_of
from peft_adapters import ATTENTION, save_adapter
from random_params import random_requests
from sampled_cases import ALL
from tiny_models import VOCAB, make_model
from transformers import PreTrainedModel

from fa_serve.engine import Engine
from fa_serve.engine.runner import attention_kinds
from fa_serve.engine.start import start_up
from fa_serve.engine.start.warm_up import EmptyStep, SamplingVariant
from fa_serve.launching.compilations import Compilers

LIMITS = {"num_pages": 128, "page_size": 16, "max_num_batched_tokens": 192, "max_model_len": 128}
LORA = {"lora_bytes": 1 << 26, "max_lora_rank": 32}
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 2},
    "two-pages": {"r": 20},
    "attention": {"r": 5, "target_modules": ATTENTION},
}
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, model=make_model(), **options) for name, options in ADAPTERS.items()}


@pytest.fixture
def make(make_engine, caplog) -> Iterator[Make]:
    """Engines in bfloat16, whose warm-up comes to its end."""

    def start(family: str = "llama", model: PreTrainedModel | None = None, **settings: Any) -> Engine:
        return make_engine(model=(model or make_model(family)).to(torch.bfloat16), **LIMITS | settings)

    yield start
    assert "the warm-up failed" not in caplog.text


def prepare(engine: Engine) -> None:
    start_up.warm_up(engine._runner, engine.config, engine.config.max_model_len, Compilers())


ROUNDS = 8 if ALL else 4
"""Of random requests. Those of LACKS are found within four."""


def serve(engine: Engine, adapters: tuple[str | None, ...] = (None,), *, rounds: int = ROUNDS) -> Iterator[None]:
    """Random requests, some of them alone and some in batches that do not hold all of them. Yields after each round."""
    draw = random.Random(3)
    for _ in range(rounds):
        prompts, params = random_requests(draw, (1, 3, 12), vocab=VOCAB, longest=100)
        engine.generate(prompts, params, adapter=[draw.choice(adapters) for _ in params])
        yield


def late(engine: Engine, counted: CountedLaunches, needed: str = "a name of none", **given: Any) -> list[str]:
    """What requests need after the warm-up: kernels of Triton, as fa_serve counts them, and operations of PyTorch.

    needed: how the name of the one begins after which no more requests are made
    """
    prepare(engine)
    compiled = len(counted.kernels)
    assert engine.preparations()[0] == compiled > 10
    listed = set(counted.sampling)
    found: list[str] = []
    for _ in serve(engine, **given):
        found = counted.kernels[compiled:] + sorted(counted.sampling - listed)
        if any(name.startswith(needed) for name in found):
            break
    assert engine.preparations()[0] == len(counted.kernels)
    return found


CASES = {
    "plain": {},
    "deterministic-drafts": {"deterministic": True, "speculative": "ngram"},
    "drafts-alone": {"speculative": "ngram", "max_num_seqs": 1},
    "processed-float8-cache": {"logprobs_mode": "processed_logprobs", "kv_cache_dtype": "fp8"},
    "windows": {"family": "gemma2"},
    "experts": {"family": "gpt-oss"},
}
APART = {
    "deterministic": {"deterministic": True},
    "drafts": {"speculative": "ngram"},
    "processed": {"logprobs_mode": "processed_logprobs"},
    "float8-cache": {"kv_cache_dtype": "fp8"},
}
"""What CASES have together, each night."""
if ALL:
    CASES |= APART


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_request_needs_a_kernel_that_the_warm_up_leaves_out(make: Make, case: str) -> None:
    engine = make(**CASES[case])
    rounds = ROUNDS // 2 if case == "drafts-alone" else ROUNDS  # where each step has one request
    with counted_launches() as counted:
        assert late(engine, counted, rounds=rounds) == []


@pytest.mark.slow
def test_no_request_needs_another_kernel_than_those_of_a_step_that_is_captured(make: Make, replays) -> None:
    engine = make()
    with counted_launches() as counted:
        engine._runner.make_graphs()
        assert late(engine, counted) == []
    assert engine.preparations()[1] > 1
    assert len(replays) > 50


@pytest.mark.slow
def test_no_request_with_an_adapter_needs_another_kernel(make: Make, adapters: dict[str, Path]) -> None:
    engine = make(**LORA)
    for name, folder in adapters.items():
        engine.load_adapter(name, folder)
    with counted_launches() as counted:
        assert late(engine, counted, adapters=(None, *adapters), rounds=ROUNDS + 6) == []
    assert sum("_expand" in kernel for kernel in counted.kernels) > 4


@pytest.mark.slow
def test_no_request_of_a_hybrid_needs_another_kernel(make: Make) -> None:
    engine = make(model=copy.deepcopy(model_of("qwen3.5")))
    with counted_launches() as counted:
        assert late(engine, counted) == []


@pytest.mark.slow
def test_no_request_needs_another_kernel_where_sequences_read_common_pages_once(make: Make, monkeypatch) -> None:
    monkeypatch.setattr(attention_kinds, "LEAST_GROUP_BYTES", 1)
    engine = make(cascade_attention=True)
    with counted_launches() as counted:
        assert late(engine, counted) == []
    assert any("_merge_parts" in kernel for kernel in counted.kernels)


def samples(work: Any, wanted: Callable[[SamplingVariant], bool]) -> bool:
    return isinstance(work, SamplingVariant) and wanted(work)


def computes(work: Any, wanted: Callable[[EmptyStep], bool]) -> bool:
    return isinstance(work, EmptyStep) and wanted(work)


class Lack(NamedTuple):
    """is_left_out: tells what a warm-up lacks; needed: how the name of a kernel begins that a request needs then"""

    is_left_out: Callable[[Any], bool]
    needed: str
    settings: Mapping[str, Any] = {}


LACKS = {
    "limits": Lack(partial(samples, wanted=lambda x: x.params.top_p < 1 and x.params.min_p > 0), "_sample_rows"),
    "masks": Lack(partial(samples, wanted=lambda x: x.masked and x.params.penalised), "aten.masked_fill.Scalar float32"),
    "logprobs": Lack(partial(samples, wanted=lambda x: x.params.logprobs is not None), "aten.logsumexp"),
    "drafts": Lack(partial(samples, wanted=lambda x: x.drafts > 0), "aten.cumsum", {"speculative": "ngram"}),
    "queries": Lack(partial(computes, wanted=lambda x: x.queries > 1), "attn_fwd_hopper"),
    "prompt-logprobs": Lack(partial(computes, wanted=lambda x: x.logits > 0), "invariant_matrix", {"deterministic": True}),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_lack_of_the_warm_up_is_seen(make: Make, monkeypatch, lack: str) -> None:
    is_left_out, needed, settings = LACKS[lack]
    engine = make(**settings)
    run = engine._runner.run_warm_up
    monkeypatch.setattr(engine._runner, "run_warm_up", lambda work: None if is_left_out(work) else run(work))
    with counted_launches() as counted:
        assert any(name.startswith(needed) for name in late(engine, counted, needed))
