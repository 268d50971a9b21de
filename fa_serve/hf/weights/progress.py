"""Reports how much of a checkpoint transformers has loaded, instead of drawing its progress bar.

    with weights_counted(lambda done, total: print(f"{done} of {total}")):
        model = AutoModelForCausalLM.from_pretrained(folder)

transformers makes all its bars in one function, which takes a hook (transformers.utils.logging.set_tqdm_hook). Only the bar for
loading weights is replaced. Left out: downloads, whose bars the hub's client draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

TITLE = "Loading weights"
"""The title that transformers gives the bar."""


class CountedBar:
    """Replaces a tqdm bar: it counts, and passes everything else to `bar`, which draws nothing.

    on_progress: called with the number of tensors that are loaded, and the number of all tensors
    """

    def __init__(self, bar: Any, items: Any, total: int | None, on_progress: Callable[[int, int], None]) -> None:
        self._bar = bar
        self._items = items
        self._total = len(items) if total is None else total
        self._on_progress = on_progress
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def __enter__(self) -> CountedBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def update(self, count: int = 1) -> None:
        """Count tensors."""
        self._done += count
        self._on_progress(self._done, self._total)


@contextmanager
def weights_counted(on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Inside, `on_progress` is called after each tensor, and no bar is drawn."""

    def make(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != TITLE:
            return before(factory, args, options) if before is not None else factory(*args, **options)
        items = args[0] if args else options.get("iterable", ())
        return CountedBar(factory(*args, **options | {"disable": True}), items, options.get("total"), on_progress)

    before = set_tqdm_hook(make)
    try:
        yield
    finally:
        set_tqdm_hook(before)
