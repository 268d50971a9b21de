"""Pages of a real browser for the tests of the playground: with the server's replies, or with replies that a test makes up."""

import json

import pytest


def open_page(browser, url, **mocked):
    """A page of a browser that keeps nothing. mocked: replies by the end of the path, instead of the server's"""
    page = browser.new_page(viewport={"width": 1180, "height": 860}, color_scheme="light")
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    for path, reply in mocked.items():
        page.route(f"**/{path}", reply if callable(reply) else replying(reply))
    page.goto(url)
    return page


def expecting():
    return pytest.importorskip("playwright.sync_api").expect


def write_on(route) -> None:
    """Make an answer go on until it is stopped. The model itself may end it after four tokens."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def stream(*pieces: str, **more) -> str:
    """The body of a stream of chat completions."""
    events = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": len(pieces)}} | more)
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def replying(reply):
    return lambda route: route.fulfill(json=reply)


def answering(text: str):
    return lambda route: route.fulfill(content_type="text/event-stream", body=stream(text))


def model_card(**changes):
    card = {"id": "m", "object": "model", "created": 0, "owned_by": "fa_serve", "max_model_len": 64}
    return {"object": "list", "data": [card | {"task": "generate", "input_modalities": ["text"]} | changes]}
