"""A real server in a thread, over an engine that says what a model would say."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fa_serve.server.app import create_app
from fa_serve.server.process import Server
from fa_serve.server.settings import Settings

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% for call in message.tool_calls or [] %}[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}{% if reasoning_effort %}!{{ reasoning_effort }}{% endif %}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


@contextmanager
def in_thread(engine: Any, **settings: Any) -> Iterator[str]:
    urls = []
    ready = threading.Event()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    server = Server(create_app(engine, Settings(log_level="error", **settings)), "127.0.0.1", 0, 1.0, announce)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(10)
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def speaking(engine) -> Iterator[Callable[..., str]]:
    """`speaking(*words, template=..., setting=...)`: the address of a server whose model answers with these words."""
    with ExitStack() as servers:

        def start(*words: str, template: str = TEMPLATE, **settings: Any) -> str:
            engine.words = words or engine.words
            engine.max_model_len = 4096
            engine.tokenizer.chat_template = template
            return servers.enter_context(in_thread(engine, **settings))

        yield start


@pytest.fixture
def prompt_of(engine) -> Callable[[], str]:
    """The text of the last prompt that the engine got."""
    return lambda: engine.tokenizer.decode(engine.seen[-1].prompt)
