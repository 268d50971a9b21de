"""What tells one model, and one adapter, from another: every value, wherever it stands."""

from __future__ import annotations

import torch
from tiny_models import make_model

from fa_serve.engine.cache.identity import content_number, tensor_checksum, weights_digest


def test_a_checksum_depends_on_each_value_and_its_place() -> None:
    x = torch.arange(10_001, dtype=torch.float32)
    before = tensor_checksum(x)
    assert tensor_checksum(x.clone()) == before
    assert tensor_checksum(torch.stack([x, x])[1]) == before
    assert tensor_checksum(torch.stack([x, x], 1)[:, 1]) == before
    for place in (0, 1, 5000, 10_000):
        other = x.clone()
        other[place] += 0.5
        assert tensor_checksum(other) != before
    assert tensor_checksum(x.roll(1)) != before
    for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn):
        assert 0 <= tensor_checksum(torch.ones(7).to(dtype)) < 2**64
    assert tensor_checksum(torch.tensor(1.0)) != tensor_checksum(torch.tensor(2.0))


def test_the_digest_of_a_model_depends_on_weights_and_buffers() -> None:
    model = make_model()
    before = weights_digest(model)
    assert weights_digest(make_model()) == before
    for x in (list(model.parameters())[-1], next(iter(model.buffers()))):
        with torch.no_grad():
            x.view(-1)[-1] += 1
        after = weights_digest(model)
        assert after != before
        before = after


def test_the_number_of_an_adapter_depends_on_all_it_holds() -> None:
    base = {"a": torch.ones(2, 3), "scale": 2.0, "names": frozenset({"q", "k"}), "none": None, "list": [torch.zeros(1)]}
    number = content_number(base)
    assert content_number({**reversed_items(base)}) == number
    assert 0 < number < 2**64
    for name, value in (("a", torch.zeros(2, 3)), ("scale", 1.0), ("names", frozenset({"q"})), ("list", [])):
        assert content_number(base | {name: value}) != number


def reversed_items(values: dict[str, object]) -> dict[str, object]:
    return dict(reversed(values.items()))
