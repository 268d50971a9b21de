"""Every way to the embedded model gives the greedy tokens of eager attention.

Sixteen prompts of unequal length go through transformers' `generate` with fa_serve (left-padded, in one batch), through the
offline engine in one batch, and through a real server as sixteen concurrent requests. The dtype is float32, so a different
token is a fault and not a rounding error.
"""

from __future__ import annotations

import asyncio

import openai
import pytest
import torch
from server_process import ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig, SamplingParams

NEW_TOKENS = 24
END_TOKENS = {0, 2}  # <|endoftext|>, <|im_end|>
PROMPTS = [
    *(
        f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"
        for a, b in ((17, 25), (3, 99), (50, 50), (8, 1))
    ),
    *(f"def {name}(path):\n    " for name in ("read", "write_all", "is_open", "main", "split_the_lines_of_a_file")),
    *(f"import os\nimport sys\n\n\nclass {name}:\n" for name in ("Reader", "HTTPServer", "Node")),
    "x",
    "for i in range(10):\n" * 12,
    '"""A module."""\n\nfrom __future__ import annotations\n',
    "héllo wörld = 日本",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def _model(attention: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, attn_implementation=attention)


def _generate(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of transformers' `generate` for one left-padded batch, up to the end token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [_before_end(row) for row in out[:, longest:].tolist()]


def _before_end(tokens: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in END_TOKENS]
    return tokens[: ends[0]] if ends else tokens


@pytest.fixture(scope="module")
def eager(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """One prompt at a time, so without padding, without a batch, and each with a new cache."""
    model = _model("eager")
    return [_generate(model, [tokenizer(prompt)["input_ids"]])[0] for prompt in PROMPTS]


def test_generate(tokenizer: PreTrainedTokenizerBase, eager: list[list[int]]) -> None:
    assert _generate(_model("fa_serve"), [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]) == eager


def test_engine(tokenizer: PreTrainedTokenizerBase, eager: list[list[int]]) -> None:
    engine = Engine(EngineConfig(dtype="float32", device="cpu", num_pages=2048))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    completions = engine.generate([tokenizer(prompt)["input_ids"] for prompt in PROMPTS], params)
    assert [_before_end(completion.token_ids) for completion in completions] == eager
    ended = [len(tokens) < NEW_TOKENS for tokens in eager]
    assert [completion.finish_reason == "stop" for completion in completions] == ended
    assert any(ended)
    assert not all(ended)


def test_http_with_sixteen_at_once(tokenizer: PreTrainedTokenizerBase, eager: list[list[int]], served: ServerProcess) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                answer = await client.completions.create(
                    model="fa-serve-demo", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0
                )
                return answer.choices[0].text

            return await asyncio.gather(*map(one, PROMPTS))

    assert asyncio.run(ask()) == [tokenizer.decode(tokens) for tokens in eager]
