"""The known name nearest to an unknown name, for error messages: `nearest_name("max_token", names)` is "max_tokens"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LENGTH = 64
"""Characters of a name that are compared: a longer name is no misspelling, and the comparison takes quadratic time."""
LIKENESS = 0.75
"""The least similarity, as difflib measures it, of a known name that may have been meant."""
LEAST_PREFIX = 4
"""The fewest characters with which the beginning of a name stands for the whole name."""


def nearest_name(given: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, or None if no known name is similar.

    Upper and lower case, hyphens and underscores make no difference. A beginning of one known name stands for this name, and
    so does a name that begins with a known one.
    """
    plain = {_plain(name): name for name in known}
    wanted = _plain(given[:MAX_LENGTH])
    longer = [name for name in plain if len(wanted) >= LEAST_PREFIX and name.startswith(wanted)]
    shorter = [name for name in plain if len(name) >= LEAST_PREFIX and wanted.startswith(name)]
    alike = difflib.get_close_matches(wanted, [name for name in plain if name[:1] == wanted[:1]], n=1, cutoff=LIKENESS)
    for found in (longer if len(longer) == 1 else [], alike, sorted(shorter, key=len)[-1:]):
        if found:
            return plain[found[0]]
    return None


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
