"""Steps of the engine over state pages and tails, in PyTorch, against the recurrences in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from linear_attention_cases import KINDS, KINDS_BY_NAME, Kind, joined, of_sequence
from state_steps import Part, StateSteps

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
@pytest.mark.parametrize("page_size", [4, 32])
def test_a_sequence_in_chunks_and_single_tokens(kind: Kind, page_size: int) -> None:
    """A chunk that ends within a page, decoding over the end of a page, and few rows."""
    rows = kind.rows(120, torch.float64)
    weights = kind.weights(torch.float64)
    expected, states = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights), page_size)
    done = 0
    for count in (64, 20, *[1] * 14, 5, 16, 1):
        batch = table.begin([Part(0, count)])
        out = kind.step(of_sequence(rows, done, done + count), weights, table.states, batch)
        torch.testing.assert_close(out, expected[done : done + count])
        for position, page in table.sequences[0].kept.items():
            torch.testing.assert_close(table.states.pages[page], kind.page_of(states[position]))
        table.end()
        done += count
    assert done == 120


@every_kind
def test_rejected_drafts_leave_nothing(kind: Kind) -> None:
    """Steps of 1 to 8 rows, of which a random part is rejected, over ends of pages too."""
    rows = kind.rows(100, torch.float64)
    weights = kind.weights(torch.float64)
    wrong = {name: x.flip(0) for name, x in rows.items()}
    expected, _ = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights))
    random = Random(0)
    done = 0
    rejected_over_an_end = 0
    while done < 90:
        count = random.randint(1, 8)
        accepted = random.randint(1, count)
        batch = table.begin([Part(0, count, dropped=count - accepted)])
        parts = of_sequence(rows, done, done + accepted), of_sequence(wrong, done + accepted, done + count)
        out = kind.step(joined(parts), weights, table.states, batch)
        torch.testing.assert_close(out[:accepted], expected[done : done + accepted])
        rejected_over_an_end += (done + count) // 16 > (done + accepted) // 16
        table.end()
        done += accepted
    assert rejected_over_an_end >= 2


@every_kind
def test_mixed_steps(kind: Kind) -> None:
    """A chunk, few rows, one row and padding in one step; the padding has slot 0 and must not write there."""
    rows = kind.rows(200, torch.float64)
    weights = kind.weights(torch.float64)
    own = [of_sequence(rows, 0, 90), of_sequence(rows, 90, 130), of_sequence(rows, 130, 200)]
    expected = [kind.exact(x, weights)[0] for x in own]
    table = StateSteps(kind.spec(rows, weights))
    done = [0, 0, 0]
    plan = [
        [Part(0, 32)],
        [Part(0, 1), Part(1, 7), Part(9, 2, padding=True)],
        [Part(2, 64, stores=(16, 48)), Part(0, 1), Part(1, 1), Part(9, 1, padding=True), Part(9, 0, padding=True)],
        [Part(1, 16), Part(2, 6), Part(0, 14)],
        [Part(0, 42), Part(1, 1)],
    ]
    for parts in plan:
        batch = table.begin(parts)
        pieces = [
            of_sequence(rows, 0, part.rows)
            if part.padding
            else of_sequence(own[part.sequence], done[part.sequence], done[part.sequence] + part.rows)
            for part in parts
        ]
        out = kind.step(joined([*pieces, of_sequence(rows, 0, 3)]), weights, table.states, batch)  # and rows behind all
        first = 0
        for part in parts:
            if not part.padding:
                begin = done[part.sequence]
                actual = out[first : first + part.rows]
                torch.testing.assert_close(actual, expected[part.sequence][begin : begin + part.rows])
                done[part.sequence] += part.rows
            else:
                assert not out[first : first + part.rows].any()
            first += part.rows
        assert not out[first:].any(), "rows behind the last sequence"
        table.end()
    assert done == [90, 25, 70]


@every_kind
def test_sequences_share_a_state(kind: Kind) -> None:
    """Two sequences go on from one page in different ways. The page stays as it was."""
    rows = kind.rows(60, torch.float64)
    weights = kind.weights(torch.float64)
    other = {name: x.flip(0) for name, x in rows.items()}
    table = StateSteps(kind.spec(rows, weights))
    kind.step(of_sequence(rows, 0, 32), weights, table.states, table.begin([Part(0, 32)]))
    table.end()
    source = table.sequences[0].source
    page = table.states.pages[source].clone()
    table.add(1, slot=5, source=source, length=32)
    batch = table.begin([Part(0, 20), Part(1, 20)])
    out = kind.step(joined([of_sequence(rows, 32, 52), of_sequence(other, 32, 52)]), weights, table.states, batch)
    expected, _ = kind.exact(of_sequence(rows, 0, 52), weights)
    torch.testing.assert_close(out[:20], expected[32:])
    expected, _ = kind.exact(joined([of_sequence(rows, 0, 32), of_sequence(other, 32, 52)]), weights)
    torch.testing.assert_close(out[20:], expected[32:])
    torch.testing.assert_close(table.states.pages[source], page, rtol=0, atol=0)


def test_a_slot_is_taken_over() -> None:
    """The ring has the rows of another sequence, which the new one does not see."""
    kind = KINDS_BY_NAME["delta"]
    rows = kind.rows(40, torch.float64)
    weights = kind.weights(torch.float64)
    table = StateSteps(kind.spec(rows, weights))
    for _ in range(40):
        kind.step(of_sequence(rows, 0, 1), weights, table.states, table.begin([Part(0, 1)]))
        table.end()
    table.add(1, slot=0)
    out = kind.step(of_sequence(rows, 0, 3), weights, table.states, table.begin([Part(1, 3)]))
    torch.testing.assert_close(out, kind.exact(of_sequence(rows, 0, 3), weights)[0])


@pytest.mark.parametrize("kind", [KINDS_BY_NAME[name] for name in ("delta", "kda", "ssd", "conv")], ids=lambda kind: kind.name)
def test_steps_in_bfloat16(kind: Kind) -> None:
    """States and pseudo values are kept in float32, and outputs are rounded once."""
    rows = kind.rows(80, torch.bfloat16)
    weights = kind.weights(torch.bfloat16)
    expected, _ = kind.exact(rows, weights)
    table = StateSteps(kind.spec(rows, weights))
    outs = []
    for count in (32, *[1] * 48):
        done = sum(map(len, outs))
        batch = table.begin([Part(0, count)])
        outs.append(kind.step(of_sequence(rows, done, done + count), weights, table.states, batch))
        table.end()
    out = torch.cat(outs)
    assert out.dtype == torch.bfloat16
    allowed = 1e-5 * expected.abs().max() + torch.finfo(torch.bfloat16).eps / 2 * expected.abs()
    assert ((out.double() - expected).abs() <= allowed).all()
