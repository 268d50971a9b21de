"""The kernel for few rows in Triton's interpreter, against the recurrences in float64. Products are in float32 or float16: the
interpreter has none in bfloat16."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from large_caches import memory_on_disk
from linear_attention_cases import KINDS_BY_NAME, joined, of_sequence
from rounded_once import randn
from state_steps import Part, StateSteps

from fa_serve.launching.plans import PLANS
from fa_serve.ops import FEW_ROWS
from fa_serve.ops.linear_attention import few_rows, run


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "runs_triton", lambda device: True)


NAMES = ("delta", "delta-strong", "kda", "lightning", "ssd")


def bound(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Strong gates are sums of up to 48 numbers of -300, whose rounding is seen in what is left."""
    return float(expected.abs().max() * (2e-5 + torch.finfo(dtype).eps))


CASES = [(name, torch.float32) for name in NAMES] + [("delta", torch.float16), ("ssd", torch.float16)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_steps_over_the_ends_of_pages(name: str, dtype: torch.dtype) -> None:
    """Single tokens, drafts that are rejected over the end of a page, 16 rows, beside padding of slot 0."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(60, dtype)
    weights = kind.weights(dtype)
    expected, states = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights))
    done = 0
    for count, dropped in ((1, 0), (5, 0), (8, 0), (8, 7), (16, 0), (1, 0), (7, 3)):
        batch = table.begin([Part(0, count, dropped), Part(9, 16, padding=True), Part(3, 0, padding=True)])
        out = kind.step(joined([of_sequence(rows, done, done + count), of_sequence(rows, 0, 18)]), weights, table.states, batch)
        assert out.dtype == dtype
        assert not out[count:].any(), "padding, and two rows behind the last sequence"
        assert (out[:count].double() - expected[done : done + count]).abs().max() <= bound(expected, dtype)
        for position, page in table.sequences[0].kept.items():
            state = kind.page_of(states[position])
            assert (table.states.pages[page].double() - state).abs().max() <= bound(state, torch.float32)
        table.end()
        done += count - dropped
    assert done == 36


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta", "kda", "ssd"])
def test_bits_do_not_depend_on_the_steps(name: str) -> None:
    """Behind a page, 16 rows in one step and in three: outputs, tails and the next state."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(32, torch.float32)
    weights = kind.weights(torch.float32)
    found = []
    for counts in ((16, 16), (16, 5, 1, 10)):
        table = StateSteps(kind.spec(rows, weights))
        outs = []
        for count in counts:
            done = sum(map(len, outs))
            batch = table.begin([Part(0, count)])
            outs.append(kind.step(of_sequence(rows, done, done + count), weights, table.states, batch))
            table.end()
        found.append([torch.cat(outs), table.states.pages[table.sequences[0].source], *[x[0] for x in table.states.tails]])
    for once, often in zip(*found, strict=True):
        assert torch.equal(once, often)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("name", ["delta", "kda", "lightning", "ssd"])
def test_single_rows_have_the_bits_of_many(name: str, page_size: int) -> None:
    """Rows one by one over the end of a page, which the host knows or does not know, and in steps of many: outputs, tails and
    pages."""
    kind = KINDS_BY_NAME[name]
    length = page_size + 2
    begin = [13] if page_size == 16 else [16, 13]
    rows = kind.rows(length, torch.float32)
    weights = kind.weights(torch.float32)
    expected, _ = kind.exact(rows, weights)
    found = []
    for counts, known in (([*[16] * (page_size // 16), 2], True), ([*begin, *[1] * 5], True), ([*begin, *[1] * 5], False)):
        table = StateSteps(kind.spec(rows, weights), page_size)
        outs = []
        for count in counts:
            done = sum(map(len, outs))
            batch = table.begin([Part(0, count)])
            assert batch.most_rows == (1 if count == 1 else FEW_ROWS)
            batch = batch if known else batch._replace(most_rows=FEW_ROWS)
            outs.append(kind.step(of_sequence(rows, done, done + count), weights, table.states, batch))
            table.end()
        found.append([torch.cat(outs), table.states.pages[table.sequences[0].source], *[x[0] for x in table.states.tails]])
    torch.testing.assert_close(found[0][0].double(), expected, rtol=1e-4, atol=1e-4)
    for whole, single, unknown in zip(*found, strict=True):  # rows of a ring that are not written are NaN
        torch.testing.assert_close(single, whole, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(unknown, whole, rtol=0, atol=0, equal_nan=True)


def test_steps_of_one_row_have_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes at most one row of a sequence, and clears the rows of padding, of which there may be more."""
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(8, torch.float32)
    PLANS.clear()  # those of other tests too
    planned = []
    plan = few_rows._plan
    monkeypatch.setattr(few_rows, "_plan", lambda *args: planned.append(args[-1]) or plan(*args))
    table = StateSteps(kind.spec(rows, {}))
    for count in (5, 1):
        batch = table.begin([Part(0, count), Part(3, 2, padding=True)])
        done = 0 if count == 5 else 5
        out = kind.step(joined([of_sequence(rows, done, done + count), of_sequence(rows, 0, 2)]), {}, table.states, batch)
        assert not out[count:].any()
        table.end()
    expected, _ = kind.exact(rows, {})
    torch.testing.assert_close(out[:1].double(), expected[5:6], rtol=1e-4, atol=1e-4)
    assert planned == [False, True]


@pytest.mark.slow
def test_sequences_share_a_page_and_heads_have_strides() -> None:
    """Rows are parts of a wider tensor, as a convolution leaves them, and the page that is read stays as it was."""
    kind = KINDS_BY_NAME["delta"]
    wide = randn(40, 2 * 2 * 12 + 4 * 10, dtype=torch.float32, seed=7) / 4
    q, k, v = wide.split([24, 24, 40], 1)
    rows = kind.rows(40, torch.float32) | {
        "q": q.unflatten(1, (2, 12)),
        "k": k.unflatten(1, (2, 12)),
        "v": v.unflatten(1, (4, 10)),
    }
    expected, _ = kind.exact(of_sequence(rows, 0, 20), {})
    table = StateSteps(kind.spec(rows, {}))
    kind.step(of_sequence(rows, 0, 16), {}, table.states, table.begin([Part(0, 16)]))
    table.end()
    page = table.states.pages[table.sequences[0].source].clone()
    table.add(1, slot=5, source=table.sequences[0].source, length=16)
    parts = joined([of_sequence(rows, 16, 20), of_sequence(rows, 16, 20)])
    out = kind.step(parts, {}, table.states, table.begin([Part(0, 4), Part(1, 4)]))
    for part in out.split(4):
        torch.testing.assert_close(part.double(), expected[16:], rtol=1e-5, atol=1e-5)
    assert torch.equal(table.states.pages[table.sequences[0].source], page)


@pytest.mark.parametrize("name", ["delta", "ssd"])
def test_the_functional_form_of_few_rows(name: str) -> None:
    """Dense sequences of up to 16 rows take this kernel, with initial and final states."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(10, torch.float32)
    weights = kind.weights(torch.float32)
    begin = randn(2, *kind.state, dtype=torch.float32, seed=9)
    dense = {key: x.view(2, 5, *x.shape[1:]) for key, x in rows.items()}
    out, final = kind.dense(**dense, **weights, initial_state=begin, output_final_state=True, **kind.options)
    assert final is not None
    for i in range(2):
        expected, states = kind.exact({key: x[i] for key, x in dense.items()}, weights, begin[i])
        assert (out[i].double() - expected).abs().max() <= bound(expected, torch.float32)
        assert (final[i].double() - states[-1]).abs().max() <= bound(states[-1], torch.float32)


@pytest.mark.parametrize("name", ["delta", "conv"])
def test_pages_lie_beyond_2_to_the_31(name: str, tmp_path: Path) -> None:
    """A sequence reads a page that begins behind 2^31 elements, and writes the next one. The memory is a sparse file."""
    kind = KINDS_BY_NAME[name]
    rows = kind.rows(32, torch.float32)
    weights = kind.weights(torch.float32)
    expected, states = kind.exact(rows, weights)
    spec = kind.spec(rows, weights)
    far = (1 << 31) // prod(spec.page) + 2
    memory = memory_on_disk(tmp_path, (far + 2) * prod(spec.page), torch.float32)
    table = StateSteps(spec, num_states=1)
    states_far = table.states._replace(pages=memory.view(far + 2, *spec.page))
    states_far.pages[far] = states[16]
    table.add(0, slot=1, source=far, length=16)
    batch = table.begin([Part(0, 16)])
    batch = batch._replace(targets=torch.tensor([far + 1], dtype=torch.int32))
    out = kind.step(of_sequence(rows, 16, 32), weights, states_far, batch)
    assert (out.double() - expected[16:]).abs().max() <= bound(expected, torch.float32)
    torch.testing.assert_close(states_far.pages[far + 1].double(), states[32], rtol=1e-5, atol=1e-5)
