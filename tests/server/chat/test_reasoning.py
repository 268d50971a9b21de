"""Thoughts in texts as models write them, cut at every position: the result does not depend on the cuts."""

import pytest
from fa_serve.server.chat.reasoning import ThoughtReader, opened_by


def think(inside: bool | None, *pieces: str) -> tuple[str, str]:
    reader = ThoughtReader(inside)
    parts = [reader.read(piece, last=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


THOUGHTS = [
    pytest.param(None, "<think>\nOne <two.\n</think>\n\n Four.\n", ("One <two.", "Four.\n"), id="its own tag"),
    pytest.param(True, "\nOne.</thin\n\n</think>Four.", ("One.</thin", "Four."), id="opened by the prompt"),
    pytest.param(None, " 4 <think>no</think>", ("", " 4 <think>no</think>"), id="none"),
    pytest.param(False, "<think>4", ("", "<think>4"), id="closed by the prompt"),
    pytest.param(None, "<think>One and </thi", ("One and </thi", ""), id="cut off"),
    pytest.param(None, " <thi", ("", " <thi"), id="cut off in the tag"),
    pytest.param(None, "<think></think>4", ("", "4"), id="empty"),
    pytest.param(True, "a</think>b</think>", ("a", "b</think>"), id="closed twice"),
]


@pytest.mark.parametrize(("inside", "text", "parts"), THOUGHTS)
def test_thoughts_wherever_the_text_is_cut(inside, text, parts):
    assert think(inside, text) == parts
    assert think(inside, *text) == parts
    for cut in range(1, len(text)):
        assert think(inside, text[:cut], text[cut:]) == parts, text[:cut]


def test_what_the_prompt_says():
    ends = {"<|assistant|>": None, "<|assistant|><think>\n": True, "<|assistant|><think>\n\n</think>\n\n": False}
    assert {end: opened_by(end) for end in ends} == ends


def test_a_message_that_goes_on_says_whether_it_is_thinking():
    """Whatever the template writes before it."""
    texts = {"<think>Hm, ": True, "<think>Hm</think>4": False, "4 and ": False, " \n": None, "": None}
    assert {text: opened_by("<|assistant|>" + text, text) for text in texts} == texts
    assert opened_by("<think></think>\n\n", "") is False
    assert ThoughtReader(True, begun=True).read(" that is it.</think> 4", last=True) == (" that is it.", "4")
