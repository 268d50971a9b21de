"""The folder behind the host tier on disks that are slow, full or hang, schedulers that fail, and random traffic."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from folder_copies import IDENTITY, FailingFiles
from folder_traffic import PROMPT, again, fill, folder_of, make_traffic, run_first, settle
from host_copies import connect
from sampled_cases import examples
from state_traffic import SALTS, Traffic, prompt_of

from fa_serve.engine.cache import folder_tier
from fa_serve.engine.cache.folder_files import FileName, FolderFiles


@pytest.fixture
def files(tmp_path: Path) -> FolderFiles:
    return FolderFiles(tmp_path, IDENTITY)


class SlowFiles(FolderFiles):
    """Reads wait for `gate`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IDENTITY)
        self.gate = threading.Event()

    def read(self, name: FileName, into: memoryview) -> None:
        assert self.gate.wait(20)
        super().read(name, into)


def test_a_sequence_waits_for_its_files_and_others_go_on(files: FolderFiles) -> None:
    slow = SlowFiles(files.folder)
    traffic = make_traffic(slow)
    run_first(traffic)
    other = traffic.add("other", prompt_of([1], 5), 12)
    traffic.step()
    waiting = traffic.add("again", PROMPT, 4)
    for _ in range(4):
        traffic.step()
        assert (waiting.slot, folder_of(traffic).is_awaited) == (-1, True)
    assert traffic.scheduler.tier.is_awaited
    traffic.scheduler.tier.wait()
    before = len(other.tokens)
    slow.gate.set()
    traffic.run()
    assert len(other.tokens) > before
    assert waiting.num_cached_tokens == 36
    traffic.check_ended()


def test_a_disk_that_does_not_answer_is_not_waited_for(files: FolderFiles, monkeypatch, caplog) -> None:
    monkeypatch.setattr(folder_tier, "LONGEST_READ", 0.05)
    slow = SlowFiles(files.folder)
    traffic = make_traffic(slow)
    hashes = run_first(traffic)
    assert again(traffic) == 0
    assert "has not responded for 0.05 s" in caplog.text
    assert folder_of(traffic).reach(hashes) == 0
    traffic.scheduler.check_integrity()
    slow.gate.set()
    monkeypatch.setattr(folder_tier, "LONGEST_READ", 60.0)
    deadline = time.monotonic() + 20
    while folder_of(traffic).reach(hashes) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
        traffic.scheduler.tier.begin_step()
    fill(traffic)
    assert again(traffic, "third") == 36, "it answers again"


def test_a_sequence_that_is_aborted_while_it_waits_leaves_nothing_behind(files: FolderFiles) -> None:
    slow = SlowFiles(files.folder)
    traffic = make_traffic(slow)
    run_first(traffic)
    traffic.add("again", PROMPT, 4)
    traffic.step()
    traffic.scheduler.abort("again")
    slow.gate.set()
    deadline = time.monotonic() + 20
    while folder_of(traffic).is_awaited and time.monotonic() < deadline:
        traffic.scheduler.tier.begin_step()
    traffic.run()
    traffic.check_ended()
    assert again(traffic, "third") == 36


class FullDisk(FolderFiles):
    """The disk has room for so many files."""

    room = 10

    def write(self, name: FileName, data: memoryview) -> None:
        if len([*self.folder.rglob("*.page")]) >= self.room:
            raise OSError(errno.ENOSPC, "planted")
        super().write(name, data)


def test_a_full_disk_limits_the_folder_to_what_it_holds(files: FolderFiles, monkeypatch, caplog) -> None:
    traffic = make_traffic(FullDisk(files.folder, IDENTITY))
    traffic.add("first", PROMPT, 4)
    traffic.run()
    fill(traffic, 4)
    stats = traffic.scheduler.tier.snapshot().folder
    assert stats.num_failures >= 1
    assert stats.num_bytes <= 10 * files.size_of(512), "the budget is what the disk has taken"
    assert caplog.text.count("could not write a KV cache file") == 1, "the first failure is told"
    assert not folder_of(traffic).can_write
    monkeypatch.setattr(folder_tier, "RETRY_SECONDS", 0.0)
    folder_of(traffic)._paused_until = 0.0
    fill(traffic, 4)
    newest = [*traffic.sequences.values()][-2]
    assert any(folder_of(traffic).has("page", each) for each in newest.page_hashes), "older files have made room"
    traffic.check_ended()


@pytest.mark.parametrize("is_later", [False, True])
def test_a_disk_that_others_have_filled_for_a_moment_does_not_end_the_folder(files: FolderFiles, monkeypatch, is_later) -> None:
    """The folder is empty then. One file is tried after RETRY_SECONDS, and after FULL_SECONDS all that was allowed before."""
    full = FullDisk(files.folder, IDENTITY)
    full.room = 0
    traffic = make_traffic(full, budget=1 << 20)
    folder = folder_of(traffic)
    traffic.add("first", PROMPT, 4)
    traffic.run()
    fill(traffic, 2)
    settle(traffic)
    assert folder.index.num_bytes == 0
    assert 0 < folder.index.budget <= files.size_of(512)
    full.room = 1 << 20
    later = time.monotonic() + (folder_tier.FULL_SECONDS if is_later else folder_tier.RETRY_SECONDS)
    monkeypatch.setattr(folder_tier.time, "monotonic", lambda: later)
    fill(traffic, 2)
    settle(traffic)
    stats = traffic.scheduler.tier.snapshot().folder
    assert stats.num_bytes == (1 << 20 if is_later else files.size_of(512))
    number = stats.num_bytes_used // files.size_of(512)
    assert number > 10 if is_later else number == 1


def test_a_scheduler_that_has_failed_leaves_the_files_to_the_next_one(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    run_first(traffic)
    fresh = Traffic(traffic.scheduler.renewed(), depth=1)
    connect(fresh)
    assert again(fresh) == 36


def test_slots_that_a_hung_disk_may_write_to_are_not_used_by_the_next_scheduler(files: FolderFiles, monkeypatch) -> None:
    monkeypatch.setattr("fa_serve.engine.cache.host_tier.SETTLE_SECONDS", 0.01)
    slow = SlowFiles(files.folder)
    traffic = make_traffic(slow)
    run_first(traffic)
    traffic.add("again", PROMPT, 4)
    traffic.step()
    fresh = Traffic(traffic.scheduler.renewed(), depth=1)
    connect(fresh)
    fresh.scheduler.tier.begin_step()
    host = fresh.scheduler.pages.host
    assert len(host._taken) == 6
    assert len(host._free) == 12 - 6
    host.check_integrity()
    slow.gate.set()


def random_plan(random: Random) -> Iterator[tuple[int, bool, str]]:
    while True:
        fails = random.choice(["begin", "end"]) if random.random() < 0.05 else ""
        yield random.randrange(4), random.random() < 0.5, fails


@pytest.mark.slow
@pytest.mark.parametrize("num_states", [0, 8])
def test_random_traffic(tmp_path: Path, num_states: int, monkeypatch) -> None:
    """Every answer is what it is without a folder, which the device asserts at every step, whatever happens to files.

    Three engines in turn find the files of those before, while the budget evicts some.
    """
    monkeypatch.setattr(folder_tier, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(folder_tier, "SCAN_SECONDS", 0.1)
    hits = bad = failures = evictions = 0
    for seed in range(16):
        if seed >= examples(6) and hits > 10 and bad and failures > 20 and evictions > 20:
            break  # when a thread comes to a file decides how many there are
        random = Random(seed)
        folder = tmp_path / str(seed)
        budget = random.choice([30, 200]) * 600
        for _ in range(3):
            files = FailingFiles(folder, random, 0.08)
            slots, depth = random.choice([(4, 3), (8, 6), (40, 16)])
            traffic = make_traffic(
                files, 24, slots, num_states, slots // 4 + 1, random_plan(random), depth=depth, budget=budget, seqs=4
            )
            for number in range(40):
                beginning = prompt_of([random.randrange(3), random.randrange(3)], random.choice([8, 20, 30]))
                ending = prompt_of([random.randrange(3)], random.randrange(8))
                salt = random.choice(SALTS)
                traffic.add(f"{number}", [*beginning, *ending], random.randrange(1, 12), cache_salt=salt)
                for _ in range(random.randrange(12)):
                    outcomes = ["fail", "roll back", "not finite", "postpone"] if random.random() < 0.06 else [""]
                    traffic.step(random.choice(outcomes), random.randrange(4))
                    folder_of(traffic).index.check_integrity()
                if random.random() < 0.05:
                    traffic.scheduler.abort(f"{random.randrange(number + 1)}")
                if random.random() < 0.03:
                    while traffic.inflight:
                        traffic.take_in()
                    traffic.scheduler.forget_cache()
                if random.random() < 0.2:
                    traffic.run()
                    while traffic.scheduler.tier.save_one():
                        traffic.check()
                traffic.check()
            traffic.run()
            tier = traffic.scheduler.tier
            while tier.is_awaited:  # files for a sequence that was aborted: its pages are held until they have been read
                tier.wait()
                tier.begin_step()
            tier.finish()
            traffic.check_ended()
            stats = traffic.scheduler.tier.snapshot().folder
            assert stats.num_bytes_used <= stats.num_bytes
            hits += stats.num_hits
            bad += stats.num_bad
            failures += stats.num_failures
            evictions += stats.num_evictions
            folder_of(traffic).close()
    assert hits > 10, hits
    assert bad > 0, bad
    assert failures > 20, failures
    assert evictions > 20, evictions
