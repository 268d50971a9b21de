"""Which files a folder holds, which of them are worth keeping, and which come after others. Plain Python, no torch, no files.

    index = FolderIndex(budget=64 << 30)
    evicted = index.make_room(size)          # names of files that are to be removed, before another one is written
    index.add(name, size)
    index.withdraw(page_hash)                # this page and all that was computed from it is invalid: names of files to remove

The least recently used file is evicted first. Files of other identities (folder_files.py) are evicted, too, because the budget
is one for the whole folder. A name is found by its kind and hash. Left out: the files themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from fa_serve.engine.cache.folder_files import FileName


class FolderIndex:
    """Owner of what is known about a folder's files. Every operation is O(1) for each file that it concerns.

    budget:     the most bytes that all files may take
    num_bytes:  bytes that the known files take
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.num_evictions = 0
        self._sizes: OrderedDict[FileName, int] = OrderedDict()  # the least recently used one first
        self._names: dict[tuple[str, bytes], FileName] = {}
        self._after: dict[bytes, dict[FileName, None]] = {}  # by the hash of the page before

    def __len__(self) -> int:
        return len(self._sizes)

    def find(self, kind: str, page_hash: bytes) -> FileName | None:
        """The file of this kind for a hash; None if there is none."""
        return self._names.get((kind, page_hash))

    def reach(self, hashes: Iterable[bytes]) -> int:
        """How many of these pages, from the first one on, have files."""
        number = 0
        for page_hash in hashes:
            if ("page", page_hash) not in self._names:
                break
            number += 1
        return number

    def add(self, name: FileName, num_bytes: int) -> None:
        """There is such a file, which counts as the most recently used one. A file that is known already stays as it is."""
        key = (name.kind, name.page_hash)
        if key in self._names:
            return
        self._names[key] = name
        self._sizes[name] = num_bytes
        self.num_bytes += num_bytes
        if name.parent:
            self._after.setdefault(name.parent, {})[name] = None

    def remove(self, name: FileName) -> None:
        """There is no such file any more."""
        num_bytes = self._sizes.pop(name, None)
        if num_bytes is None:
            return
        del self._names[name.kind, name.page_hash]
        self.num_bytes -= num_bytes
        if name.parent:
            siblings = self._after[name.parent]
            del siblings[name]
            if not siblings:
                del self._after[name.parent]

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Files of these pages, in order, are used: the file of the first page counts as the most recently used one."""
        for page_hash in reversed([*hashes]):
            for kind in ("state", "page"):
                name = self._names.get((kind, page_hash))
                if name is not None:
                    self._sizes.move_to_end(name)

    def make_room(self, num_bytes: int, busy: Iterable[FileName] = ()) -> list[FileName] | None:
        """Evict files until so many bytes fit. Returns their names, or None if they cannot fit.

        busy: files that are being read or written
        """
        kept = {*busy}
        evicted = []
        excess = self.num_bytes + num_bytes - self.budget
        for name, size in self._sizes.items():
            if excess <= 0:
                break
            if name not in kept:
                evicted.append(name)
                excess -= size
        if excess > 0:
            return None
        for name in evicted:
            self.remove(name)
        self.num_evictions += len(evicted)
        return evicted

    def withdraw(self, page_hash: bytes) -> list[FileName]:
        """Forget the files of a page, and of all pages that were computed from it. Returns their names."""
        found = []
        hashes = [page_hash]
        while hashes:
            each = hashes.pop()
            own = (self._names.get((kind, each)) for kind in ("page", "state"))
            names = [name for name in own if name is not None]
            hashes += {name.page_hash for name in self._after.get(each, ())}
            for name in names:
                self.remove(name)
            found += names
        return found

    def withdraw_one(self, kind: str, page_hash: bytes) -> list[FileName]:
        """Forget a file of one kind, if there is one; for a page, all files that `withdraw` forgets. Returns their names."""
        name = self.find(kind, page_hash)
        if name is None:
            return []
        if kind == "page":
            return self.withdraw(page_hash)
        self.remove(name)
        return [name]

    def check_integrity(self) -> None:
        """Assert that all views of the files agree, and that they keep the budget."""
        assert self.num_bytes == sum(self._sizes.values())
        assert {*self._names.values()} == self._sizes.keys()
        assert all((name.kind, name.page_hash) == key for key, name in self._names.items())
        after = {name for siblings in self._after.values() for name in siblings}
        assert after == {name for name in self._sizes if name.parent}
