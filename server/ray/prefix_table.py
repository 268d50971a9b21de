"""Remembers which replicas have seen the beginning of a prompt. Plain Python, without Ray or an engine.

    table = PrefixTable()
    keys = prefix_keys(prompt, salt)
    table.note(keys, "replica-1")
    table.holders(keys, {"replica-1", "replica-2"})           # {"replica-1"}

A prompt is divided into blocks of BLOCK_TOKENS tokens. The key of a block is a hash of all tokens up to its end, as in the
engine's prefix cache, so two prompts have a key in common exactly if they begin with the same tokens. The replica that has seen
the longest beginning of a prompt is likely to have most of it in its cache. The table does not learn what an engine evicts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 17  # 8 million tokens, in some 30 MB


def prefix_keys(prompt: Sequence[int], salt: Hashable) -> list[int]:
    """The key of each whole block. salt: prompts with different salts have no key in common"""
    key = hash(salt)
    keys = []
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        key = hash((key, *prompt[end - BLOCK_TOKENS : end]))
        keys.append(key)
    return keys


class PrefixTable:
    """For each of the `max_blocks` blocks that were noted last, the replicas that have seen it."""

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self._max_blocks = max_blocks
        self._holders: OrderedDict[int, set[str]] = OrderedDict()

    def note(self, keys: Sequence[int], replica: str) -> None:
        """Note that a prompt with these keys goes to a replica."""
        # the first blocks are noted last, so that the ends of prompts are forgotten before their beginnings
        for key in reversed(keys):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def holders(self, keys: Sequence[int], replicas: Collection[str]) -> set[str]:
        """The ones of `replicas` that have seen the longest beginning; all of `replicas` if none has seen a block."""
        for key in reversed(keys):
            if found := self._holders.get(key, set()).intersection(replicas):
                return found
        return set(replicas)

    def forget(self, replica: str) -> None:
        """Forget a replica that has ended."""
        for key in [key for key, holders in self._holders.items() if replica in holders]:
            self._holders[key].discard(replica)
            if not self._holders[key]:
                del self._holders[key]
