"""Requests of a scheduler whose host tier has a folder behind it (folder_copies.py)."""

from __future__ import annotations

from folder_copies import make_folder_tier
from host_copies import connect
from scheduling import make_scheduler
from state_traffic import Traffic, prompt_of

from fa_serve.engine.cache.folder_files import FolderFiles
from fa_serve.engine.cache.folder_tier import FolderTier

PROMPT = prompt_of([0], 39)


def make_traffic(files: FolderFiles, num_pages=24, slots=12, num_states=0, state_slots=8, plan=None, **options) -> Traffic:
    depth = options.pop("depth", max(slots // 4, 1))
    budget = options.pop("budget", 1 << 30)
    tier = make_folder_tier(files, slots, state_slots, plan, depth, budget)
    traffic = Traffic(make_scheduler(num_pages, 4, tokens=64, num_states=num_states, make_tier=tier, **options), depth=1)
    connect(traffic)
    return traffic


def folder_of(traffic: Traffic) -> FolderTier:
    folder = traffic.scheduler.tier.folder
    assert folder is not None
    return folder


def settle(traffic: Traffic) -> None:
    """Until everything is written that the host has."""
    for _ in range(1000):
        traffic.scheduler.tier.begin_step()
        if not folder_of(traffic).is_writing:
            return
        folder_of(traffic).wait_for_writes(1.0)


def fill(traffic: Traffic, count: int = 6, length: int = 40) -> None:
    """Prompts that take the pages of the device and of the host."""
    for _ in range(count):
        number = len(traffic.sequences)
        traffic.add(f"fill-{number}", prompt_of([2, number % 3, number // 3 % 3, number // 9], length), 8)
        traffic.run()
        settle(traffic)


def run_first(traffic: Traffic, **fields: object) -> list[bytes]:
    """A prompt whose pages have left the device and the host afterwards. Returns their hashes."""
    sequence = traffic.add("first", PROMPT, 4, **fields)
    traffic.run()
    while traffic.scheduler.tier.save_one():
        pass
    fill(traffic)
    hashes = sequence.page_hashes[:9]
    assert not traffic.scheduler.pages.reach(hashes)
    assert folder_of(traffic).reach(hashes) == 9
    return hashes


def again(traffic: Traffic, name: str = "again", **fields: object) -> int:
    """Cached tokens of the same prompt once more."""
    sequence = traffic.add(name, PROMPT, 4, **fields)
    traffic.run()
    traffic.check_ended()
    return sequence.num_cached_tokens
