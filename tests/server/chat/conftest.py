"""An engine that says what a model would say, and a chat template with tools."""

from typing import Any

import pytest

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if x %}<tool_call></tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.id }}:{{ call.function.name }}:{{ call.function.arguments.a + 1 }}]{% endfor %}{% endfor %}<|assistant|>"
)


@pytest.fixture
def teller(engine, serving):
    """`async with teller(words, template) as client`: an application over an engine that answers with these words."""

    def start(words: tuple[str, ...], template: str = TEMPLATE, **settings: Any):
        engine.words = words
        engine.max_model_len = 4096
        engine.tokenizer.chat_template = template
        return serving(**settings)

    start.template = TEMPLATE
    return start
