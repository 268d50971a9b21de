"""docs/rooms.md has a line for each package, from its docstring.

To write the tree again: FA_SERVE_WRITE_DOCS=1 pytest tests/docs/test_rooms.py
"""

from __future__ import annotations

from documentation import ROOT, check_generated
from report_rooms import rooms, subject, tree


def test_the_tree_is_that_of_the_packages() -> None:
    check_generated(ROOT / "docs" / "rooms.md", "tree of rooms", tree())


def test_each_room_has_a_subject_of_its_own() -> None:
    subjects = {str(room): subject(room) for room in rooms()}
    assert [room for room, text in subjects.items() if len(text) < 20] == []
    assert len(set(subjects.values())) == len(subjects)
    assert {"server/chat", "fa_serve/ops/products/quantised", "fa_serve/engine/scheduler"} <= subjects.keys()
