"""Bounds before work, from the outside: variants of the attacks in attacks.py that are near a bound, on either side of it.

Without the guards, honest clients waited 59 s for 3.3 million messages, 12.6 s for 1.4 million fields, and 23.5 s for an
answer of 350 MB, and 1,500 idle connections locked everybody out.
"""

import resource
import time

import pytest
from security import attacks
from security.conftest import ATTACKER, HONEST, MODEL
from security.probe import Probe

CHAT_HEAD = b'{"model":"%b","messages":[' % MODEL.encode()
TEXT_HEAD = b'{"model":"%b","prompt":"a",' % MODEL.encode()
ITEMS_HEAD = b'{"model":"%b","input":[' % MODEL.encode()
TURNS_HEAD = b'{"model":"%b","max_tokens":4,"messages":[' % MODEL.encode()
NEAR_A_BOUND = {
    "messages that are numbers": (attacks.CHAT, CHAT_HEAD + b"1," * 450_000 + b"1]}", "messages"),
    "unknown fields": (attacks.CHAT, b"{" + b",".join(b'"%d":1' % i for i in range(45_000)) + b"}", "0"),
    "valid messages": (attacks.CHAT, CHAT_HEAD + b",".join([b'{"role":"user","content":"a"}'] * 9_500) + b"]}", "messages"),
    "biases": (
        attacks.COMPLETIONS,
        TEXT_HEAD + b'"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(45_000)) + b"}}",
        "logit_bias",
    ),
    "token ids": (attacks.COMPLETIONS, TEXT_HEAD + b'"stop_token_ids":[' + b"1," * 450_000 + b"1]}", "stop_token_ids"),
    "items that are numbers": (attacks.RESPONSES, ITEMS_HEAD + b"1," * 450_000 + b"1]}", "input"),
    "valid items": (attacks.RESPONSES, ITEMS_HEAD + b",".join([b'{"role":"user","content":"a"}'] * 9_500) + b"]}", "input"),
    "turns that are numbers": (attacks.MESSAGES, TURNS_HEAD + b"1," * 450_000 + b"1]}", None),
    "blocks without a type": (
        attacks.MESSAGES,
        TURNS_HEAD + b'{"role":"user","content":[' + b"{}," * 45_000 + b"{}]}]}",
        None,
    ),
    "choices": (attacks.COMPLETIONS, TEXT_HEAD + b'"guided_choice":[' + b'"",' * 45_000 + b'""]}', "guided_choice[0]"),
}


@pytest.mark.parametrize("kind", NEAR_A_BOUND)
def test_a_body_that_is_just_within_the_bounds(fortress, kind):
    path, body, param = NEAR_A_BOUND[kind]
    with fortress.under_attack(kind):
        replies = attacks.together(lambda: fortress.post(path, body), 4)
        time.sleep(0.5)
    for reply in replies:
        # Anthropic's errors name the field in their message alone
        assert (reply.status_code, reply.json()["error"].get("param")) == (400, param), reply.text[:200]


def test_the_largest_answers_do_not_hold_up_the_event_loop(fortress):
    """15 MB of log-probabilities: made beside the event loop, in small steps.

    Only /health is asserted. On a CPU, the engine is a thread of the same process, and a step that reports 20,000
    log-probabilities delays a completion by seconds.
    """
    probe = Probe(fortress.url, HONEST)
    replies = attacks.together(lambda: fortress.complete([5] * 1000, ATTACKER, n=16, max_tokens=1, prompt_logprobs=20), 2)
    report = probe.stop()
    print(f"\nlargest answers: {report.figures()}")
    assert not report.failures
    assert report.health.p99 <= fortress.limits()["health"]
    for reply in replies:
        assert reply.status_code == 200
        assert len(reply.content) > 10_000_000


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 20, "stream": True}, {"prompt_logprobs": 20, "best_of": 128}])
def test_an_answer_that_is_much_larger_than_its_request(fortress, fields):
    with fortress.under_attack("large answers"):
        reply = fortress.complete([5] * 2000, ATTACKER, n=128, max_tokens=1, **fields)
        time.sleep(0.5)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "answer_too_large")
    assert error["param"] in fields


def test_1500_idle_connections_lock_out_nobody(start_fortress):
    """They give way, are counted, and are logged once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        fortress = start_fortress()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    idle = 1500 if before[0] > 2000 else 600
    with fortress.under_attack("idle connections"), attacks.Silent(fortress.address, idle, b""):
        time.sleep(2)
        assert fortress.metric("connections_refused_total", 'reason="gave_way"') >= idle - 256
    assert fortress.log.read_text().count("connections are in use") == 1


def test_a_body_that_dribbles_ends_at_its_deadline(start_fortress):
    fortress = start_fortress("--body-timeout", "2")
    head = attacks.head(attacks.COMPLETIONS, ATTACKER, "Content-Length: 1000")
    with fortress.under_attack("dribbled bodies"), attacks.Silent(fortress.address, 100, head) as silent:
        end = time.monotonic() + 8
        while silent.open and time.monotonic() < end:
            silent.dribble()
            time.sleep(0.2)
        assert silent.open == 0
    assert fortress.metric("connections_refused_total", 'reason="body_timeout"') == 100
