"""Images through the three APIs: the answers are those that transformers generates for the same pictures."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fa_serve.server.app import create_app
from fa_serve.server.images.loader import decode
from fa_serve.server.settings import Settings
from image_models import TEMPLATE, picture, png, save_llava
from transformers import AutoProcessor

from fa_serve.engine import AsyncEngine
from fa_serve.engine.images.processor import PromptMaker
from fa_serve.sandbox.trials import Trials
from fa_serve.spec import ParameterError

pytestmark = pytest.mark.anyio
PICTURES = [picture(1), picture(2)]


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(png(PICTURES[number]))}}


def chat(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, **FIXED, **fields}


FIXED = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
TEXT = {"type": "text", "text": "What is the difference?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[..., tuple[list[int], list[int]]]:
    """Prompt and answer of transformers for a text with these pictures."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    processor = AutoProcessor.from_pretrained(folder)

    def generate(text: str, *numbers: int, count: int = 6) -> tuple[list[int], list[int]]:
        images = [PICTURES[n] for n in numbers] or None
        inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None)
        length = inputs["input_ids"].shape[1]
        return output[0, :length].tolist(), output[0, length:].tolist()

    return generate


@pytest.fixture
def serving(folder: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(**given: Any) -> AsyncIterator[httpx.AsyncClient]:
        settings = Settings(model=str(folder), served_model_name="tiny", device="cpu", num_pages=64, max_model_len=256, **given)
        app = create_app(AsyncEngine(settings.engine_config()), settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
        ):
            await app.state.service.loaded()
            client.service = app.state.service
            yield client

    return start


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_two_images_in_a_chat(serving, expected) -> None:
    prompt, answer = expected("user: <image> and <image>What is the difference?\nassistant: ", 0, 1)
    body = chat(image_part(0), {"type": "text", "text": " and "}, image_part(1), TEXT)
    async with serving() as client:
        for cached in (0, 32):  # the second time, the pages of the prompt are known
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            [choice] = reply["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, answer)
            assert reply["usage"]["prompt_tokens"] == len(prompt)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["task"], card["input_modalities"]) == ("generate", ["text", "image"])
        other = chat(image_part(1), {"type": "text", "text": " and "}, image_part(0), TEXT)
        reply = (await client.post("/v1/chat/completions", json=other)).json()
        assert reply["choices"][0]["token_ids"] != answer, "the pictures do not matter"
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.usefixtures("warm_trials")
async def test_a_processor_that_the_process_cannot_load(serving, expected, monkeypatch, caplog) -> None:
    """Pictures are processed in the server then: the answer is the same."""
    prompt, answer = expected("user: <image>What is the difference?\nassistant: ", 0)
    prepared = Trials.__init__

    def without_a_folder(self: Trials, module: str, given: dict[str, Any], *others: Any, **named: Any) -> None:
        prepared(self, module, given | {"processor": {"path": "/nowhere", "trust_remote_code": False}}, *others, **named)

    monkeypatch.setattr(Trials, "__init__", without_a_folder)
    async with serving() as client:
        [choice] = (await client.post("/v1/chat/completions", json=chat(image_part(0), TEXT))).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, answer)
    assert "images are processed in the server's own process" in caplog.text


@pytest.mark.usefixtures("warm_trials")
async def test_the_process_starts_before_the_first_picture(serving, monkeypatch) -> None:
    """The server is ready meanwhile: the process takes seconds to load transformers."""
    began = threading.Event()
    gate = threading.Event()
    start = Trials.start

    def held(self: Trials) -> None:
        began.set()
        gate.wait(20)
        start(self)

    monkeypatch.setattr(Trials, "start", held)
    async with serving() as client:
        assert (await client.get("/ready")).status_code == 200
        assert await asyncio.to_thread(began.wait, 20)
        assert not gate.is_set()
        gate.set()
        trials = client.service.tokenization._loader._trials
        while trials._process is None:
            await asyncio.sleep(0.01)
        process = trials._process
        reply = await client.post("/v1/chat/completions", json=chat(image_part(0), TEXT))
        assert reply.status_code == 200
        assert trials._process is process


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_who_shares_what_is_made_of_a_picture(serving, monkeypatch) -> None:
    """Requests that share prefixes share images too, and others do not."""
    decoded = []
    answers = []

    def noted(data: Any, max_result: int, trial: Any, key: bytes) -> Any:
        decoded.append(key)
        return decode(data, max_result, trial, key)

    monkeypatch.setattr("fa_serve.server.images.loader.decode", noted)
    keys = ["a" * 32, "b" * 32]
    body = chat(image_part(0), TEXT)
    async with serving(api_keys=keys) as client:
        for key, salt in ((keys[0], None), (keys[0], None), (keys[1], None), (keys[0], "salt"), (keys[0], "salt")):
            given = body if salt is None else body | {"cache_salt": salt}
            reply = await client.post("/v1/chat/completions", json=given, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["choices"][0]["token_ids"])
        question = {"model": "tiny", "messages": body["messages"]}
        reply = await client.post("/tokenize", json=question, headers={"authorization": f"Bearer {keys[1]}"})
        assert reply.status_code == 200, reply.text
    assert len(decoded) == len(set(decoded)) == 3
    assert answers == answers[:1] * 5


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_n_and_streaming(serving, expected) -> None:
    _, answer = expected("user: <image>What is the difference?\nassistant: ", 1)
    async with serving() as client:
        reply = (await client.post("/v1/chat/completions", json=chat(image_part(1), TEXT, n=2))).json()
        assert [choice["token_ids"] for choice in reply["choices"]] == [answer, answer]
        text = reply["choices"][0]["message"]["content"]
        lines = (await client.post("/v1/chat/completions", json=chat(image_part(1), TEXT, stream=True))).text.splitlines()
    import json

    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_responses_and_messages(serving, expected) -> None:
    prompt, _ = expected("user: <image>What is the difference?\nassistant: ", 0)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(PICTURES[0])).decode()}
    async with serving() as client:
        whole = (await client.post("/v1/chat/completions", json=chat(image_part(0), TEXT))).json()
        text = whole["choices"][0]["message"]["content"]
        content = [{"type": "input_image", "image_url": uri(png(PICTURES[0]))}, {"type": "input_text", "text": TEXT["text"]}]
        body = {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 6, "temperature": 0}
        response = (await client.post("/v1/responses", json=body)).json()
        assert response["usage"]["input_tokens"] == len(prompt)
        assert text.startswith(response["output"][-1]["content"][0]["text"])
        turn = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
        body = {"model": "tiny", "messages": [turn], "max_tokens": 6, "temperature": 0}
        message = (await client.post("/v1/messages", json=body)).json()
        assert message["usage"]["input_tokens"] + message["usage"].get("cache_read_input_tokens", 0) == len(prompt)
        assert text.startswith(message["content"][0]["text"])
        del body["max_tokens"], body["temperature"]
        assert (await client.post("/v1/messages/count_tokens", json=body)).json() == {"input_tokens": len(prompt)}


CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": [image_part(0), {"type": "text", "text": "a photo"}]},
]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_images_in_results_of_tools(serving, expected, tmp_path) -> None:
    """Through the three APIs, if the chat template writes them."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE + "{# tool_calls #}")
    prompt, answer = expected("user: Look.\nassistant: \ntool: <image>a photo\nassistant: ", 0)
    result = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(PICTURES[0])).decode()},
        },
        {"type": "text", "text": "a photo"},
    ]
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": result}]},
    ]
    output = [{"type": "input_image", "image_url": uri(png(PICTURES[0]))}, {"type": "input_text", "text": "a photo"}]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "call00001", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call00001", "output": output},
    ]
    async with serving(chat_template=str(path)) as client:
        body = {"model": "tiny", "messages": TOOL_TURNS, "max_tokens": 6, **FIXED}
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, answer)
        counted = await client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": turns})
        assert counted.json() == {"input_tokens": len(prompt)}
        answered = await client.post("/v1/responses", json={"model": "tiny", "input": items, "max_output_tokens": 16})
        assert answered.json()["usage"]["input_tokens"] == len(prompt)
        # an image that is refused is named where the client has written it
        result[0]["source"]["data"] = "QUJD"
        output[0]["image_url"] = uri(b"%PDF")
        for route, body, place in (
            ("/v1/messages", {"messages": turns, "max_tokens": 1}, "messages[2].content[0].content[0].source.data"),
            ("/v1/responses", {"input": items}, "input[2].output[0].image_url"),
        ):
            reply = await client.post(route, json={"model": "tiny", **body})
            assert reply.status_code == 400
            assert reply.json()["error"]["message"].startswith(f"{place} must be a complete PNG, JPEG, WebP or GIF"), reply.text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_a_template_that_leaves_out_images_is_named(serving, tmp_path, caplog) -> None:
    """The client has not written the prompt, and cannot know that places are missing in it."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE.replace("%}<image>{%", "%}{%"))
    async with serving(chat_template=str(path)) as client:
        reply = await client.post("/v1/chat/completions", json=chat(image_part(0), TEXT))
        [card] = (await client.get("/v1/models")).json()["data"]
    assert card["input_modalities"] == ["text"]
    assert "the chat template has no place for images, which the model takes: --chat-template may" in caplog.text
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"].startswith("The chat template must write a placeholder for each image, got 0 for 1 images: ")
    assert "--chat-template" in error["message"]
    assert error["param"] == "messages"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
async def test_detail_has_no_effect(serving, detail: str) -> None:
    """Whatever OpenAI's clients may send."""
    part = image_part(0)
    plain = {"type": "input_image", "image_url": part["image_url"]["url"]}
    part["image_url"]["detail"] = detail
    body = {"model": "tiny", "input": [{"role": "user", "content": [plain | {"detail": detail}]}], "max_output_tokens": 1}
    async with serving() as client:
        assert (await client.post("/v1/chat/completions", json=chat(part, TEXT))).status_code == 200
        assert (await client.post("/v1/responses", json=body)).status_code == 200


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_a_template_that_leaves_out_images_of_tools_is_named(serving, tmp_path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        TEMPLATE.replace("part['type'] == 'image'", "part['type'] == 'image' and message['role'] != 'tool'")
        + "{# tool_calls #}"
    )
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}  # which is no image: nothing decodes it
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "image", "source": source}]}],
        },
    ]
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,QUJD"}]},
        {"type": "function_call", "call_id": "call00001", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call00001",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,QUJD"}],
        },
    ]
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {"messages": TOOL_TURNS}, "messages[2].content[0].image_url.url"),
        ("/v1/messages", {"messages": [*TOOL_TURNS[:1], *blocks]}, "messages[2].content[0].content[0].source.data"),
        ("/v1/responses", {"input": items}, "input[2].output[0].image_url"),
    ]
    async with serving(chat_template=str(path)) as client:
        for route, body, place in requests:
            limit = {"max_output_tokens" if "input" in body else "max_tokens": 16}
            reply = await client.post(route, json={"model": "tiny", **body, **limit})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["message"] == (
                f"{place} must not be in a tool result, because this model's chat template leaves out images there: put the "
                "image into a user message after the result."
            )
            assert reply.json()["error"].get("param") in (place, None)
        turns = [*TOOL_TURNS[:2], TOOL_TURNS[2] | {"content": "a photo"}, {"role": "user", "content": [image_part(0)]}]
        reply = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": turns, "max_tokens": 1})
        assert reply.status_code == 200, reply.text


@pytest.mark.slow
@pytest.mark.usefixtures("warm_trials")
async def test_all_runs_of_a_requests_template_have_one_limit_of_time(serving, monkeypatch) -> None:
    """Whether it writes images of tools is tried before they are fetched, and the rest afterwards."""
    made = []
    new_trial = Trials.trial

    def trial(trials: Trials, owner: Any = None) -> Any:
        if trials.limits.setting == "template":
            assert owner is None, "a template that is hostile meets no other one"
            made.append(new_trial(trials))
            return made[-1]
        return new_trial(trials, owner)

    monkeypatch.setattr(Trials, "trial", trial)
    async with serving(allow_request_chat_template=True) as client:
        body = {"model": "tiny", "messages": TOOL_TURNS, "max_tokens": 1, "chat_template": TEMPLATE + "{# tool_calls #}"}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        [first] = made
        assert first._waited > 0
        quiet = TEMPLATE.replace("<image>", "").replace("{% for", "{# tool_calls #}{% for", 1)
        reply = await client.post("/v1/chat/completions", json=body | {"chat_template": quiet})
        assert reply.status_code == 400
        assert "must not be in a tool result" in reply.json()["error"]["message"]


async def test_a_model_without_images_names_the_image(serving, monkeypatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ParameterError("images", "be empty, because this model has no processor", "tiny")

    monkeypatch.setattr(PromptMaker, "of_model", refuse)
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "data:x"}]}
    async with serving() as client:
        reply = await client.post("/v1/responses", json={"model": "tiny", "input": [item]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input[0].content[1].image_url")
    assert error["message"] == (
        "input[0].content[1].image_url must be left out: the images of a request to this model must be empty, because this "
        "model has no processor."
    )


@pytest.mark.usefixtures("warm_trials")
async def test_what_a_client_writes_is_no_place_of_an_image(serving, expected) -> None:
    async with serving() as client:
        body = chat(image_part(0), {"type": "text", "text": "Is <image> a tag?"})
        reply = (await client.post("/v1/chat/completions", json=body)).json()
        counts = [choice["prompt_token_ids"].count(296) for choice in reply["choices"]]
        assert counts == [4], reply
        reply = await client.post("/v1/chat/completions", json=chat({"type": "text", "text": "<image>"}))
        assert reply.status_code == 200
