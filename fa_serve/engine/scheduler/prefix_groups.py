"""Which sequences of a decoding step share leading pages, and whether attention should read these only once. No torch.

    groups = PrefixGroups(page_size=16, least_keys=16384)
    groups.arrange(batch)                    # members are neighbours in batch.chunks now, and batch.groups says which

The pages of sequences form a tree, because sequences that share a page share all pages before it. A group is a node of this
tree: its members share the pages from the root up to there. Each sequence is in one group at most, so the largest gain is found
from the leaves up: a node is a group itself, or its children are divided further, whichever saves more keys.

A sequence begins to share pages when it is admitted, so groups are computed again only when other sequences run than in the
previous step. Left out: the attention of groups (hf/adapter/common_prefix.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import is_

from fa_serve.engine.scheduler.scheduled_batch import PrefixGroup, ScheduledBatch

MAX_DEPTH = 64
"""Levels of branches at which groups are looked for. Python's stack is bounded, and deeper levels gain little."""
MAX_MEMBERS = 16
"""The most members of a group: attention reads keys once for this many queries. A larger group is divided."""


class PrefixGroups:
    """Finds groups for steps in which every sequence computes only its last token.

    least_keys: a step has groups only if they save reading at least this many keys; 0 turns groups off
    """

    def __init__(self, page_size: int, least_keys: int) -> None:
        self._page_size = page_size
        self._least_keys = least_keys
        # the page lists of the newest step's sequences (the lists that the sequences own), and what was found for them
        self._known: list[list[int]] = []
        self._order: list[int] = []
        self._groups: list[PrefixGroup] = []

    def renewed(self) -> PrefixGroups:
        """`PrefixGroups` with the same settings, without the groups that were found."""
        return PrefixGroups(self._page_size, self._least_keys)

    def arrange(self, batch: ScheduledBatch) -> None:
        """Bring the members of each group together, the groups first, if that saves enough."""
        if not self._least_keys or len(batch.chunks) < 2 or batch.num_prompt_tokens or batch.num_drafts:
            return
        pages = [chunk.sequence.pages for chunk in batch.chunks]
        if len(pages) != len(self._known) or not all(map(is_, pages, self._known)):
            self._find(pages, [chunk.start // self._page_size for chunk in batch.chunks])
        if self._groups:
            batch.chunks = [batch.chunks[place] for place in self._order]
            batch.groups = self._groups

    def _find(self, pages: list[list[int]], full: list[int]) -> None:
        """Find the groups of these sequences. full: how many leading pages of each sequence hold only computed keys"""
        self._known = pages
        self._groups = []
        self._order = []
        saved, nodes = _divide(list(range(len(pages))), 0, pages, full)
        if saved * self._page_size < self._least_keys:
            return
        for members, common in nodes:
            parts = -(-len(members) // MAX_MEMBERS)
            bounds = [len(members) * part // parts for part in range(parts + 1)]
            self._groups += [PrefixGroup(b - a, common) for a, b in pairwise(bounds)]
            self._order += members
        alone = set(range(len(pages))).difference(self._order)
        self._order += sorted(alone)


def _divide(
    members: Sequence[int], known: int, pages: Sequence[list[int]], full: Sequence[int], depth: int = 0
) -> tuple[int, list[tuple[Sequence[int], int]]]:
    """The best groups among these members, which share their first `known` pages -> pages saved, and (members, pages) of each.

    A group that exceeds MAX_MEMBERS is divided into parts. Each part reads the shared pages once.
    """
    if len(members) < 2:
        return 0, []
    common = _num_common(members, known, pages, full)
    parts = -(-len(members) // MAX_MEMBERS)
    own = (len(members) - parts) * common
    if depth == MAX_DEPTH:
        return own, [(members, common)] if own else []
    children: dict[int, list[int]] = {}
    for member in members:
        if common < full[member]:
            children.setdefault(pages[member][common], []).append(member)
    found = [_divide(child, common + 1, pages, full, depth + 1) for child in children.values() if len(child) > 1]
    saved = sum(each for each, _ in found)
    if saved > own:
        return saved, [node for _, nodes in found for node in nodes]
    return own, [(members, common)] if own else []


def _num_common(members: Sequence[int], known: int, pages: Sequence[list[int]], full: Sequence[int]) -> int:
    """How many leading full pages all members share. They share the first `known`."""
    first = pages[members[0]]
    count = min(full[member] for member in members)
    for member in members[1:]:
        other = pages[member]
        low = known
        # lists are compared by the interpreter, page by page, so the differing page is looked for in ranges that grow
        step = 16
        while low < count and first[low : min(low + step, count)] == other[low : min(low + step, count)]:
            low = min(low + step, count)
            step *= 2
        while low < count and step > 1:
            step //= 2
            if first[low : min(low + step, count)] == other[low : min(low + step, count)]:
                low = min(low + step, count)
        count = low
    return count
