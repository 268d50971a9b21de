"""A real server process with the embedded model, used through openai-python."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

MODEL = "fa-serve-demo"


PROMPTS = [f"{'import os' * (i % 3)}\n\nclass {name}:\n" for i, name in enumerate("ABCDEFGHIJKLMNOP")]


MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def eventually(condition, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.02)


def test_plain_and_streamed_chat_agree(client, conforms):
    wanted = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}
    reply = client.chat.completions.create(**wanted)
    conforms("CreateChatCompletionResponse", reply.model_dump(exclude_unset=True))
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        conforms("CreateChatCompletionStreamResponse", chunk.model_dump(exclude_unset=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == reply.choices[0].message.content
    assert text == "17 + 25 = 42."
    assert chunks[-2].choices[0].finish_reason == reply.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_batch_of_prompts_and_seed(client):
    wanted = {"model": MODEL, "max_tokens": 8, "seed": 3, "n": 2, "extra_body": {"return_token_ids": True}}
    reply = client.completions.create(prompt=PROMPTS[:2], **wanted)
    again = client.completions.create(prompt=PROMPTS[1], **wanted)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices[2:]] == [choice.text for choice in again.choices]
    assert again.choices[0].text != again.choices[1].text
    ids = client.completions.create(prompt=again.choices[0].prompt_token_ids, **wanted)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in again.choices]


def test_stop_string(client):
    wanted = {"model": MODEL, "prompt": "import os\n", "temperature": 0, "max_tokens": 32}
    text = client.completions.create(**wanted).choices[0].text
    stopped = client.completions.create(**wanted, stop=text[5:8]).choices[0]
    assert stopped.text == text[: text.index(text[5:8])]
    assert stopped.finish_reason == "stop"


def test_logprobs_and_bias(client, conforms):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3)
    conforms("CreateChatCompletionResponse", reply.model_dump(exclude_unset=True))
    *spoken, end = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in spoken).decode() == reply.choices[0].message.content
    assert end.token == "<|im_end|>"
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in spoken), "greedy takes the likeliest"
    forced = client.completions.create(model=MODEL, prompt="a", max_tokens=3, logit_bias={"65": 100}, logprobs=1).choices[0]
    assert len(set(forced.logprobs.tokens)) == 1
    assert "".join(forced.logprobs.tokens) == forced.text
    assert forced.logprobs.text_offset == [0, 1, 2]


@pytest.mark.slow
def test_many_at_once_equal_one_by_one(served, client):
    wanted = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    alone = [client.completions.create(prompt=prompt, **wanted).choices[0].text for prompt in PROMPTS]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.completions.create(prompt=PROMPTS[number], **wanted, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(len(PROMPTS))))

    assert asyncio.run(together()) == alone
    assert len(set(alone)) > 8


def test_models_and_errors(client, conforms):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "fa_serve"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 5000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="2047"):
        client.completions.create(model=MODEL, prompt=[2048])
    with pytest.raises(openai.BadRequestError) as field:
        client.completions.create(model=MODEL, prompt="x", stream=True, extra_body={"beam_width": 3})
    assert field.value.param == "beam_width"
    conforms("ErrorResponse", field.value.response.json())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_frees_its_pages(served, stream):
    body = {"model": MODEL, "prompt": "x", "n": 4, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    url = f"{served.url}/v1/completions"
    tokens = served.metric("generation_tokens_total")
    aborted = served.aborted()
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.5) as response:
        list(zip(response.iter_raw(), range(20), strict=False))
    eventually(lambda: served.metric("num_requests_running") == 0)
    assert served.metric("kv_cache_usage_perc") == 0
    assert served.metric("generation_tokens_total") - tokens < 4 * 1900, "they ran to their end"
    assert served.aborted() - aborted == 4


def test_the_example_runs(served):
    example = Path(__file__).parents[2] / "examples" / "openai_client.py"
    ended = subprocess.run([sys.executable, str(example), "--url", served.url], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["chat:", "stream:", *["sample"] * 4, *(str(3 * i + 1) for i in range(8))]
    assert "17 + 25 = 42" in lines[0]
