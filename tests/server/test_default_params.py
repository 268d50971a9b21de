"""Parameters that a request leaves out come from the engine's defaults, which the model's generation_config.json decides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

from fa_serve.demo import model_path
from fa_serve.engine import SamplingParams

DEFAULTS = SamplingParams(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, presence_penalty=0.0, max_tokens=9
)
MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def chosen(engine) -> dict[str, float]:
    return {name: getattr(engine.seen[-1].params, name) for name in NAMES}


@pytest.mark.anyio
@pytest.mark.parametrize("path", ROUTES)
async def test_what_a_request_leaves_out_is_the_default_and_what_it_gives_wins(serving, engine, path) -> None:
    engine.default_params = DEFAULTS
    expected = {name: getattr(DEFAULTS, name) for name in NAMES}
    async with serving() as client:
        body = {"model": "fake", **ROUTES[path]}
        own_length = body.get("max_tokens", 9)
        for stream in (False, True):
            assert (await client.post(path, json=body | {"stream": stream})).status_code == 200
            assert chosen(engine) == expected
            assert engine.seen[-1].params.max_tokens == own_length
        known = {"/v1/responses": ("temperature", "top_p"), "/v1/messages": ("temperature", "top_k", "top_p")}.get(path, NAMES)
        for name in known:  # neutral values are values too
            assert (await client.post(path, json=body | {name: NEUTRAL[name]})).status_code == 200
            assert chosen(engine) == expected | {name: NEUTRAL[name]}
        length = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
        assert (await client.post(path, json=body | {length: 30})).status_code == 200
        assert engine.seen[-1].params.max_tokens == 30, "the default is no limit"
        if path == "/v1/responses":
            assert (await client.post(path, json=body)).json()["temperature"] == 0.6
            assert (await client.post(path, json=body | {"top_p": 1.0})).json()["top_p"] == 1.0


@pytest.mark.anyio
async def test_a_long_default_does_not_lengthen_a_completion_and_fits_behind_the_prompt(serving, engine) -> None:
    engine.default_params = SamplingParams(max_tokens=10_000)
    async with serving() as client:
        assert (await client.post("/v1/completions", json={"model": "fake", "prompt": "Hi"})).status_code == 200
        assert engine.seen[-1].params.max_tokens == 16
        assert (await client.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES})).status_code == 200
        assert engine.seen[-1].params.max_tokens == engine.max_model_len - len(engine.seen[-1].prompt)


@pytest.mark.slow
def test_the_start_prints_them_and_a_flag_turns_them_off(start_server, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.01, "top_k": 5, "repetition_penalty": 1.3}))
    body = {"model": "model", "prompt": "for i in range(", "max_tokens": 12}
    explicit = {"temperature": 0.01, "top_k": 5, "repetition_penalty": 1.3}

    def text(url: str, **fields: object) -> str:
        return str(httpx.post(f"{url}/v1/completions", json=body | fields, timeout=60).json()["choices"][0]["text"])

    told = "temperature 0.01, top_k 5, repetition_penalty 1.3 by default, from generation_config.json (--generation-config)"
    served = start_server(str(folder), "--dtype", "float32")
    off = start_server(str(folder), "--dtype", "float32", "--generation-config", "none")
    try:
        assert any(line.startswith("sampling") and told in line for line in served.lines)
        assert not any(line.startswith("sampling") for line in off.lines)
        assert text(served.url, seed=1) == text(off.url, seed=2, **explicit)
        assert text(served.url, temperature=0, repetition_penalty=1.0) == text(off.url, temperature=0)
        assert text(served.url, temperature=0) != text(off.url, temperature=0)
    finally:
        served.end()
        off.end()
