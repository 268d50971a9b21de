"""Bodies are counted without their texts, also where a text, an escape or a piece ends at an awkward place."""

import json
import random
from contextlib import suppress

import pytest
from fa_serve.server.bounds import json_bounds
from fa_serve.server.bounds.json_bounds import JsonBounds, JsonTotal
from fa_serve.server.errors import TooLarge


def counted(value):
    """(containers and commas, containers and texts) of a value."""
    if not isinstance(value, dict | list):
        return 0, int(isinstance(value, str))
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    return 1 + max(len(value) - 1, 0) + sum(v for v, _ in inner), 1 + names + sum(f for _, f in inner)


def refused(values, fields, body):
    with suppress(TooLarge):
        JsonBounds(values, fields).check(body)
        return False
    return True


def some_value(draw, depth=3):
    kind = draw.randrange(6 if depth else 3)
    if kind == 0:
        return draw.randrange(100)
    if kind < 3:
        return "".join(draw.choice('a,:{}[]"\\\n é') for _ in range(draw.randrange(12)))
    items = [some_value(draw, depth - 1) for _ in range(draw.randrange(1, 6))]
    return items if kind < 5 else {some_value(draw, 0) if i % 2 else str(i): item for i, item in enumerate(items)}


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 16])
def test_texts_do_not_count_wherever_a_piece_ends(piece, monkeypatch):
    monkeypatch.setattr(json_bounds, "PIECE", piece)
    draw = random.Random(piece)
    for _ in range(200):
        value = some_value(draw)
        body = json.dumps(value, ensure_ascii=bool(draw.randrange(2)), separators=(",", ":")).encode()
        values, fields = counted(value)
        assert not refused(values, fields, body), body
        assert not values or refused(values - 1, fields, body), body
        assert not fields or refused(values, fields - 1, body), body


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"a, [b]: {c} " * 500_000 + b'"',
        b'["' + b'\\",' * 1_000_000 + b'"]',
        b'["' + b"\\\\" * 1_000_000 + b'",1]',
        b"[" + b"12345," * 900_000 + b"1]",
    ],
    ids=["prose", "quotes", "backslashes", "token ids"],
)
def test_large_honest_bodies_pass(body):
    assert not refused(1_000_000, 100_000, body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"{}," * 100_000 + b"{}]",
        b"{" + b'"a":0,' * 100_000 + b'"b":0}',
        b"[" + b"0," * 1_000_000 + b"0]",
        b"[" * 100_001,
    ],
    ids=["objects", "fields", "numbers", "nesting"],
)
def test_a_small_body_of_many_values_is_refused(body):
    with pytest.raises(TooLarge, match="--max-json-") as error:
        JsonBounds(1_000_000, 100_000).check(body)
    assert (error.value.status, error.value.code) == (413, "too_many_values")


def test_a_number_of_thousands_of_digits_is_refused_and_a_text_of_them_is_not():
    """The time to read an integer is quadratic in its digits: 16 MB of them took 107 ms with the interpreter's lock."""
    bounds = JsonBounds(500_000, 50_000)
    number = "12345678901234567890" * 100
    for body in ([int(number)] * 3, {"a": [1, -int(number)]}):
        with pytest.raises(TooLarge, match="at most 512 digits") as error:
            bounds.check(json.dumps(body).encode())
        assert error.value.code == "number_too_long"
    with pytest.raises(TooLarge):
        bounds.check(b"[" + b" " * (json_bounds.PIECE - 1000) + b"0." + number.encode() + b"]")  # two pieces have parts of it
    bounds.check(json.dumps({"text": number, number: [1e308, int(1e308), 2**64]}).encode())


def test_texts_of_json_count_together():
    """Each is below the bounds. Commas and brackets inside of their texts do not count."""
    bounds = JsonBounds(100, 40)
    code = json.dumps({"code": "[a, {b}]; " * 1000})  # one object, a name and a text
    total = JsonTotal(bounds, "the arguments")
    for _ in range(13):
        total.add(code)
    with pytest.raises(TooLarge, match="The arguments must have at most 40 objects, lists and strings") as error:
        total.add(code)
    assert (error.value.status, error.value.code) == (413, "too_many_values")
    numbers = JsonTotal(bounds, "the arguments")
    numbers.add("{}")
    numbers.add(json.dumps([1] * 90))
    with pytest.raises(TooLarge, match="at most 100 values"):
        numbers.add(json.dumps([1] * 20))
    with pytest.raises(TooLarge, match="A number in the arguments must have at most 512 digits"):
        JsonTotal(bounds, "the arguments").add("1" * 600)
