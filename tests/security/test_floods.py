"""Work that no budget of the engine counts, and texts that grow: what another client gets meanwhile.

The default is a short version of each attack. FA_SERVE_LOAD=full runs the long ones, prints all figures, and runs them on a
server whose engine is a separate process as well. test_charges.py has what can be told without measuring latencies.
"""

from __future__ import annotations

import threading
import time

import pytest
from security import attacks
from security.conftest import ATTACKER, FULL, Fortress
from security.flood import Flood

SECONDS = 12.0 if FULL else 2.5
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
    "{{ x }}{% endfor %}{# tools tool_calls #}"
)
FLAGS = [(), ("--process",)] if FULL else [()]


@pytest.fixture(scope="module", params=FLAGS, ids=lambda flags: "process" if flags else "thread")
def served(request, tmp_path_factory, start_for_module) -> Fortress:
    template = tmp_path_factory.mktemp("template") / "zephyr.jinja"
    template.write_text(ZEPHYR)
    return start_for_module("--chat-template", str(template), *request.param)


@pytest.mark.parametrize("reconnect", [False, True] if FULL else [False], ids=lambda new: "new" if new else "kept")
@pytest.mark.parametrize("name", attacks.FLOODS)
def test_a_flood_of_unpaid_work(served: Fortress, name: str, reconnect: bool):
    request = attacks.FLOODS[name](ATTACKER)
    with served.under_attack(f"{name}, connections {'new' if reconnect else 'kept'}"):
        flood = Flood(served.url, [request], reconnect=reconnect)
        time.sleep(SECONDS)
        counts = flood.stop()
    print(counts)
    assert sum(counts.values()) > 0


def test_a_flood_of_prompts_with_many_token_ids(served: Fortress):
    with served.under_attack("many ids"):
        flood = Flood(served.url, [attacks.post(attacks.many_ids(), ATTACKER)], connections=10)
        time.sleep(SECONDS)
        print(flood.stop())


def test_megabytes_in_what_a_template_gets_beside_the_messages(served: Fortress):
    with served.under_attack("large variables"):
        flood = Flood(served.url, [attacks.post(attacks.large_variables(), ATTACKER)], connections=6)
        time.sleep(SECONDS)
        print(flood.stop())


@pytest.mark.parametrize("name", ["eos_token", "x"])
def test_a_text_that_a_template_writes_for_each_message(served: Fortress, name: str):
    """362 kB became a prompt of 980 MB: the memory rose from 484 to 3,289 MB."""
    messages = [{"role": "user", "content": ""}] * 4900
    body = attacks.chat(messages=messages, chat_template_kwargs={name: "x" * 200_000})
    with served.under_attack(f"a text in {name}", growth=150 * 2**20):
        for _ in range(5 if FULL else 1):
            reply = served.post(*body)
            time.sleep(0.5)
    assert reply.status_code == 400, reply.text
    assert len(reply.content) < 4096


def test_floods_together(served: Fortress):
    """Different work at the same time, from one key and one address, with connections that come and go."""
    floods = []
    with served.under_attack("floods together"):
        for number, make in enumerate(attacks.FLOODS.values()):
            floods.append(Flood(served.url, [make(ATTACKER)], connections=4, reconnect=bool(number % 2)))
        time.sleep(2 * SECONDS)
        stopping = [threading.Thread(target=flood.stop) for flood in floods]
        for each in stopping:
            each.start()
        for each in stopping:
            each.join()
