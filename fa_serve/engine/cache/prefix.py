"""The pages of sequences that the prefix cache offers to other sequences. Plain Python, no torch.

    prefix = PrefixPages(pages)
    prefix.shared(sequence)                  # pages with its first tokens that are in the prefix cache
    prefix.offer(sequence)                   # its full pages are shared from now on
    prefix.withdraw(sequence, start)         # those from token `start` on are not, because they are missing or not finite

Pages are offered when the step that fills them is scheduled. This is safe because steps run in order, and within a step every
layer writes all keys and values before it reads any. Left out: who gets pages (scheduler.py), and their hashes (pages.py).
"""

from __future__ import annotations

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.scheduler.sequence import SequenceState


class PrefixPages:
    """The scheduler's hand in the prefix cache of a `PageTable`."""

    def __init__(self, pages: PageTable) -> None:
        self._pages = pages

    def shared(self, sequence: SequenceState) -> list[int]:
        """The pages with the first tokens of a waiting sequence that are in the prefix cache."""
        pages = self._pages
        pages.hash_pages(sequence.tokens, sequence.page_hashes, sequence.request.cache_salt)
        # The last token is computed in any case, because its logits are wanted. For prompt_logprobs all tokens are.
        known = 0 if sequence.num_prompt_logits(2) else (sequence.num_tokens - 1) // pages.page_size
        return pages.match(sequence.page_hashes[:known])

    def offer(self, sequence: SequenceState) -> None:
        """Register the pages that are full, or will be when the launched steps have run."""
        pages = self._pages
        if not pages.prefix_caching:
            return
        full = min(sequence.num_computed, len(sequence.tokens)) // pages.page_size
        if full <= sequence.num_offered:
            return
        hashes = sequence.page_hashes
        pages.hash_pages(sequence.tokens, hashes, sequence.request.cache_salt)
        for index in range(sequence.num_offered, full):
            pages.register(sequence.pages[index], hashes[index], hashes[index - 1] if index else b"")
        sequence.offer(full)

    def withdraw(self, sequence: SequenceState, start: int) -> None:
        """Keep others from sharing what this sequence was to write from token `start` on: it is missing or not finite."""
        first = max(start // self._pages.page_size, sequence.num_shared, sequence.num_released)
        if sequence.num_offered > first:
            self._pages.unregister(sequence.pages[first : sequence.num_offered])
            sequence.offer(first)

    def withdraw_all(self, sequence: SequenceState) -> None:
        """The same for all its pages, and for those that other sequences have computed and it shares."""
        self._pages.unregister(sequence.held_pages)
        self._pages.forget(sequence.page_hashes)

    def withdraw_left(self, sequence: SequenceState) -> None:
        """The same for what a preempted sequence has left, from its first token on that is not confirmed."""
        confirmed = max(sequence.num_confirmed, sequence.num_cached_tokens)
        self._pages.forget(sequence.page_hashes[confirmed // self._pages.page_size :])
