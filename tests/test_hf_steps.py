"""The short way of a layer sends the driver what the long way sends it, or leaves the call alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_serve import api
from fa_serve.backends.launch import Launch
from fa_serve.backends.triton import steps
from fa_serve.backends.triton.decode import launch_dense
from fa_serve.hf import attention, ops
from fa_serve.hf.masks import Implicit
from fa_serve.spec import UnsupportedModelError

OPTIONS: dict[str, Any] = {"softmax_scale": 0.25, "window_size": (-1, 0), "softcap": 0.0}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the driver, either way; no kernel runs."""
    seen: list[tuple[Any, ...]] = []

    def launch(self: Any, tensors: Any) -> None:
        seen.append((*self._grid, 77, "fixed", *(0 if x is None else x.data_ptr() for x in tensors), *self._numbers))
        self._sender = (lambda *args: seen.append(args), ("fixed",), (), lambda device: 77, 0)

    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return seen


def inputs(batch: int, keys: int, dim_v: int = 64, masked: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As transformers' growing cache lays them out, seen as `fa_serve.attention` takes them."""
    q = torch.zeros(batch, 8, 1, 64, dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.zeros(batch, 2, keys, dim, dtype=torch.bfloat16).transpose(1, 2) for dim in (64, dim_v))
    return q, k, v, torch.ones(batch, 1, 1, keys, dtype=torch.bool) if masked else None


def as_layers_hold_them(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask


CASES = {
    "one sequence": ({"batch": 1}, {}),
    "a batch": ({"batch": 3}, {}),
    "no mask": ({"batch": 2, "masked": False}, {}),
    "window": ({"batch": 2}, {"window_size": (100, 0), "softcap": 30.0}),
    "values of another size": ({"batch": 2, "dim_v": 32}, {}),
    "one piece": ({"batch": 200, "few": True}, {}),
}


@pytest.mark.parametrize(("shape", "changes"), CASES.values(), ids=CASES)
def test_a_step_sends_what_a_launch_sends(sent: list[tuple[Any, ...]], shape: dict[str, Any], changes: dict[str, Any]) -> None:
    shape = dict(shape)
    options = OPTIONS | changes
    first, later = (40, 50) if shape.pop("few", False) else (600, 700)
    step = steps.make_step(*inputs(keys=first, **shape), **options)
    assert step is not None
    q, k, v, mask = inputs(keys=later, **shape)
    sent.clear()
    launch_dense(q, k, v, mask=mask, sinks=None, out=None, return_lse=False, **options)
    expected = sent.copy()
    sent.clear()
    out = step(*as_layers_hold_them(q, k, v, mask))
    assert out is not None
    assert out.shape == (q.shape[0], 1, 8, v.shape[3])
    assert len(expected) == len(sent) == (1 if first == 40 else 2)
    for theirs, ours, pointers in zip(expected, sent, (14, 6), strict=False):
        first_number = 5 + pointers
        assert ours[:5] == theirs[:5]
        assert ours[first_number:] == theirs[first_number:]
        assert [bool(x) for x in ours[5:first_number]] == [bool(x) for x in theirs[5:first_number]]
    assert sent[0][5:8] == expected[0][5:8] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert sent[0][16] == (0 if mask is None else mask.data_ptr())
    assert sent[0][8] == out.data_ptr()


def test_what_is_not_alike_goes_the_long_way(sent: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, mask = inputs(2, 600)
    step = steps.make_step(q, k, v, mask, **OPTIONS)
    assert step is not None
    assert mask is not None
    sent.clear()
    unaligned = torch.ones(2 * 600 + 1, dtype=torch.bool)[1:].view(2, 1, 1, 600)
    assert step(*as_layers_hold_them(q, k, v, unaligned)) is None
    other = torch.zeros(2, 600, 2, 64, dtype=torch.bfloat16)
    assert step(*as_layers_hold_them(q, k, other, mask)) is None, "strides of v unlike k's"
    with monkeypatch.context() as watched:
        watched.setattr(steps, "is_watched", lambda: True)
        assert step(*as_layers_hold_them(q, k, v, mask)) is None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert step(*as_layers_hold_them(q, k, v, mask)) is None
    assert not sent
    odd = torch.zeros(2, 2, 600, 68, dtype=torch.bfloat16).transpose(1, 2)
    assert steps.make_step(q, odd[..., :64], odd[..., :64], mask, **OPTIONS) is None
    sent.clear()
    assert steps.make_step(q.expand(2, 5, 8, 64), k, v, None, **OPTIONS) is None, "several queries"
    assert not sent


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which way each call has gone, on what passes for a GPU whose backend has a short one."""
    ways: list[str] = []

    class Backend:
        @staticmethod
        def step(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
            assert type(options["softmax_scale"]) is float
            assert options["softmax_scale"] in (0.25, 0.5, 0.625, 0.75, 64**-0.5)
            ways.append("made")
            return lambda *args: ways.append("used") or q.new_full((1,), 5.0)

    monkeypatch.setattr(ops, "_STEPS", {})
    monkeypatch.setattr(api, "_backend", lambda *args: Backend())
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(api, "attention", lambda q, *args, **options: ways.append("long") or q.new_full((1,), 7.0))
    return ways


def test_the_adapter_keeps_one_step_for_what_is_alike(made: list[str]) -> None:
    """The long way goes first, with its checks, and again for whatever it looks at."""

    def call(batch: int, keys: int, change: Any = lambda q, k, v, mask: (q, k, v, mask), **changes: Any) -> list[str]:
        made.clear()
        q, k, v, mask = inputs(batch, keys, **{name: changes.pop(name) for name in ("dim_v", "masked") if name in changes})
        ops.attend(*change(*as_layers_hold_them(q, k, v, mask)), sinks=None, **(OPTIONS | changes))
        return made.copy()

    assert call(2, 600) == ["long", "made"]
    assert call(2, 601) == call(2, 1000) == ["used"]
    others: list[dict[str, Any]] = [
        {"masked": False},
        {"dim_v": 32},
        {"softmax_scale": None},
        {"window_size": (9, 0)},
        {"softcap": 3.0},
        {"change": lambda q, k, v, mask: (q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), mask)},
        {"change": lambda q, k, v, mask: (q, k.repeat(1, 1, 1, 2)[..., ::2], v, mask)},
        {"change": lambda q, k, v, mask: (q.repeat(1, 1, 1, 2)[..., ::2], k, v, mask)},
        {"change": lambda q, k, v, mask: (q, k, v.half(), mask)},
        {"change": lambda q, k, v, mask: (q.to("meta"), k, v, mask)},
        {"change": lambda q, k, v, mask: (q, k, v, mask[:1])},
        {"change": lambda q, k, v, mask: (q, k, v, mask[..., :1])},
        {"change": lambda q, k, v, mask: (q, k, v, mask.repeat(1, 1, 1, 2)[..., ::2])},
    ]
    for other in others:
        assert call(2, 600, **other) == ["long", "made"], other
        assert call(2, 600, **other) == ["used"], other
    scale = torch.tensor(0.75)
    assert call(2, 600, softmax_scale=scale) == call(2, 600, softmax_scale=scale.fill_(0.625)) == ["long", "made"]
    assert call(2, 600, softmax_scale=scale.clone()) == call(2, 600, softmax_scale=None) == ["used"]
    assert call(2, 1024) == call(3, 600) == ["long", "made"]
    for without in (
        lambda q, k, v, mask: (q, k, v, mask.float()),
        lambda q, k, v, mask: (q, k, v, mask.expand(2, 8, 1, 600)),
        lambda q, k, v, mask: (q, k[:, :, :16], v[:, :, :16], mask[..., :16]),
    ):
        assert call(2, 600, without) == call(2, 600, without) == ["long"], "no step reads such a call"
    assert call(2, 17) == ["long", "made"]


def test_prompts_that_are_alike_are_of_the_same_length(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles and bounds are a length's own, strides those of one memory; a mask sends them the long way."""
    few: list[bool] = []
    backend = api._backend
    monkeypatch.setattr(api, "_backend", lambda *args: few.append(args[-1]) or backend(*args))

    def call(queries: int, keys: int, change: Any = lambda q, k, v: (q, k, v), mask: Tensor | None = None) -> list[str]:
        made.clear()
        q = torch.zeros(2, queries, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
        k, v = (torch.zeros(2, 2, keys, 64, dtype=torch.bfloat16) for _ in range(2))
        ops.attend(*change(q, k, v), mask, sinks=None, **OPTIONS)
        return made.copy()

    assert call(600, 600) == ["long", "made"]
    assert call(600, 600) == ["used"]
    for change in (
        lambda q, k, v: (q, k[:, :, :599], v[:, :, :599]),
        lambda q, k, v: (q.contiguous(), k, v),
        lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        lambda q, k, v: (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
    ):
        assert call(600, 600, change) == ["long", "made"]
        assert call(600, 600, change) == ["used"]
    assert call(600, 601) == call(599, 600) == call(17, 600) == ["long", "made"]
    assert few == [False] * 8
    assert call(16, 600) == call(2, 600) == ["long", "made"]
    assert few[8:] == [True, True]
    for mask in (torch.ones(2, 1, 1, 600, dtype=torch.bool), torch.ones(2, 1, 600, 600, dtype=torch.bool)):
        assert call(600, 600, mask=mask) == ["long"]
    assert call(16, 16) == ["long"]


def test_layers_of_a_forward_that_are_alike_are_checked_once(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their mask, which is new in each forward; whatever makes a layer another call sends it through the checks."""
    asked: list[Tensor | None] = []
    attend = ops.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, mask, **o: asked.append(mask) or attend(q, k, v, mask, **o))
    q, k, v, padding = as_layers_hold_them(*inputs(2, 600))
    assert padding is not None
    mask = Implicit((-1, 0), padding=padding[:, 0, 0])

    def layer(mask: Any = mask, q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> str:
        made.clear()
        asked.clear()
        attention.attention_forward(torch.nn.Module(), q, k, v, mask, **({"scaling": 0.25} | options))
        return f"{made[0]}, {'checked' if asked else 'at once'}"

    class Batch:
        def attend(self, module: object, q: Tensor, *args: object, **options: object) -> Tensor:
            made.append("pages")
            return q

    with torch.no_grad():
        assert [layer() for _ in range(3)] == ["long, checked", "used, at once", "used, at once"]
        later = Implicit((-1, 0), padding=mask.padding)
        assert [layer(later) for _ in range(2)] == ["used, checked", "used, at once"]
        spread = torch.zeros(2, 600, 2, 64, dtype=torch.bfloat16).transpose(1, 2)
        others: list[dict[str, Any]] = [
            {"scaling": 0.5},
            {"softcap": 5.0},
            {"v": v[..., :32]},
            {"q": q[:1], "k": k[:1], "v": v[:1]},
            {"k": spread},
            {"q": q.double(), "k": k.double(), "v": v.double()},
            {"q": q.repeat(1, 1, 1, 2)[..., ::2]},
            {"q": q.to("meta")},
        ]
        for other in others:
            assert layer(**other).endswith(", checked"), other.keys()
        bare = Implicit((-1, 0))
        shorter = {"k": k[:, :, :599], "v": v[:, :, :599]}
        ways = [layer(bare), layer(bare), layer(bare, **shorter), layer(bare, **shorter)]
        assert ways == ["long, checked", "used, at once", "used, checked", "used, at once"], "a length of its own"
        prompt = {"q": q.repeat(1, 1, 600, 1)}
        ways = [layer(bare, **prompt), layer(bare, **prompt), layer(Implicit((-1, 0)), **prompt), layer(later, **prompt)]
        assert ways == ["long, checked", "used, at once", "used, checked", "long, checked"], "many queries, without padding"
        assert layer(later, **prompt) == "long, at once"
        assert layer(is_causal=True, sliding_window=9, dropout=0.0) == "used, at once", "the mask says more than the module"
        for extra in ({"s_aux": torch.zeros(8)}, {"position_bias": torch.zeros(1, 8, 1, 600)}):
            assert layer(**extra) == "long, at once", "what a step has no place for goes the long way, past all that is kept"
        assert layer(fa_serve_batch=Batch()) == "pages, at once"
        one: dict[str, Any] = {"q": q[:1], "k": k[:1], "v": v[:1]}
        starts = torch.tensor([0, 1], dtype=torch.int32)
        alone = Implicit((-1, 0), padding=padding[:1, 0, 0])
        assert [layer(alone, **one) for _ in range(2)] == ["long, checked", "used, at once"]
        assert layer(alone, **one, cu_seq_lens_q=starts) == "long, at once"
        for other_mask in (
            Implicit((-1, 0), keys=520, padding=padding[:1, 0, 0, :520]),
            replace(alone, starts=starts, steps={}),
        ):
            assert [layer(other_mask, **one)[-7:] for _ in range(2)] == ["checked"] * 2, "what is cut is not asked for again"
        monkeypatch.setattr(attention, "_same_sequence", lambda *args: padding[:1])
        for place, name in ((torch.compiler, "is_compiling"), (torch._C, "_is_tracing")):
            with monkeypatch.context() as tracing:
                tracing.setattr(place, name, lambda: True)
                assert layer() == "long, at once", "a tracer sees one node"
        monkeypatch.undo()
    made.clear()
    with pytest.raises(UnsupportedModelError):
        attention.attention_forward(torch.nn.Module(), q, k, v, mask, scaling=0.25, dropout=0.1)
    assert not made


def test_a_step_that_is_not_the_way_leaves_the_call_to_the_checks(made: list[str]) -> None:
    """A layer on another device, an odd address, a profiler; and gradients."""
    q, k, v, _ = as_layers_hold_them(*inputs(2, 600))
    mask = Implicit((-1, 0))

    def layer() -> list[str]:
        made.clear()
        attention.attention_forward(torch.nn.Module(), q, k, v, mask, scaling=0.25)
        return made.copy()

    with torch.no_grad():
        assert [layer(), layer()] == [["long", "made"], ["used"]]
        ((alike, step),) = mask.steps.items()
        mask.steps[alike] = lambda *args: made.append("refused")
        assert layer() == ["refused", "long"]
        mask.steps[alike] = step
    assert layer() == ["long"], "a step has no gradients"


def test_what_the_adapter_gives_back_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models view it as they like."""
    spread = torch.zeros(2, 5, 4, 8).transpose(1, 2)
    monkeypatch.setattr(api, "attention", lambda *args, **options: spread)
    monkeypatch.setattr(api, "attention_varlen", lambda *args, **options: spread)
    options: dict[str, Any] = {"softmax_scale": None, "window_size": (-1, -1), "softcap": 0.0, "sinks": None}
    x = torch.zeros(2)
    assert ops.attention(x, x, x, mask=None, **options).is_contiguous()
    assert ops.attention_varlen(x, x, x, x, x, 1, 1, **options).is_contiguous()
