"""After a start ahead, no request waits for a compiler, whatever it asks for; nor for PyTorch to load its kernels."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from random_params import random_params
from tiny_models import SIZES, make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from fa_serve.engine import Engine, EngineConfig, SamplingParams, StructuredOutput

STRUCTURED = [None, None, StructuredOutput(regex="[a-f]{3,9}"), StructuredOutput(choice=("yes", "no"))]


def make_engine(vocab_size: int = 512, **settings: Any) -> Engine:
    sizes = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": vocab_size}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES | sizes | {"max_position_embeddings": 4096}), dtype=torch.bfloat16
    ).to("cuda")
    config = {"num_pages": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "device": "cuda", "seed": 0}
    return Engine(EngineConfig(**config | settings), model=model, tokenizer=make_tokenizer(), ahead=True)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"speculative": "ngram"}, id="ngram"),
        pytest.param({"target_itl": None}, id="chunks"),
    ],
)
def test_no_combination_of_parameters_is_compiled_for_a_request(settings: dict[str, Any]) -> None:
    engine = make_engine(**settings)
    before = engine.preparations()
    assert before[0] > 20, "kernels were compiled or loaded"
    draw = random.Random(3)
    for _ in range(12):
        params = []
        for _ in range(draw.choice((1, 3, 40))):
            structured = draw.choice(STRUCTURED)
            given = {"allowed_token_ids": None, "logit_bias": None} if structured else {}
            params.append(random_params(draw, structured=structured, max_tokens=draw.randint(1, 24), **given))
        prompts = [[draw.randrange(5, 320) for _ in range(int(2 ** draw.uniform(0, 10)))] for _ in params]
        engine.generate(prompts, params)
    assert engine.preparations()[0] == before[0]


def test_the_first_sampled_batch_takes_no_longer_than_the_second() -> None:
    """PyTorch loads each of its kernels when it is first launched, and memory is asked of the driver once."""
    engine = make_engine(vocab_size=128_256)
    warm = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[7 + index] * 40 for index in range(64)]
    engine.generate(prompts, warm)  # captures what the offline engine captures on its way
    engine.generate(prompts, warm)
    params = SamplingParams(max_tokens=8, top_p=0.9, top_k=50, frequency_penalty=0.5, logprobs=5, ignore_eos=True)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - begin)
    assert seconds[0] < 1.5 * min(seconds[1:]) + 0.02, f"seconds of each run: {seconds}"
