"""`engine.matcher`: what a request is charged for its grammar, and what copies share."""

from __future__ import annotations

import numpy as np
import pytest

from fa_serve.engine.request.params import StructuredOutput
from fa_serve.engine.structured.matcher import SLOW_SECONDS, USUAL_SECONDS


def test_a_mask_for_each_draft_may_take_the_usual_time(make_engine) -> None:
    matcher = make_engine().grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    matcher.charge(8 * USUAL_SECONDS, 8)
    assert matcher.slow_seconds == 0.0
    matcher.charge(8 * USUAL_SECONDS)
    assert matcher.slow_seconds == pytest.approx(7 * USUAL_SECONDS)


def test_copies_share_the_budget_of_their_request_and_the_first_mask(make_engine, tokenizer) -> None:
    matcher = make_engine().grammars.matcher(StructuredOutput(regex="[0-9]{3}"))
    other = matcher.deep_copy()
    mask = np.arange(4, dtype=np.int32)
    other.keep_first(mask)
    assert (matcher.kept_first() == mask).all()
    other.consume_token(tokenizer.convert_tokens_to_ids("1"))
    assert other.kept_first() is None, "it is behind its first token"
    assert matcher.kept_first() is not None
    other.charge(SLOW_SECONDS + 1.0)
    assert matcher.is_error()
    assert "its token masks took more than 0.25 s longer" in matcher.get_error()
