"""A folder behind the host tier under traffic, with real files: what has left the memory comes back, whatever files suffer."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from folder_copies import IDENTITY
from folder_traffic import PROMPT, again, fill, folder_of, make_traffic, run_first, settle
from state_traffic import prompt_of

from fa_serve.engine.cache import folder_tier
from fa_serve.engine.cache.folder_files import FileName, FolderFiles
from fa_serve.engine.cache.folder_tier import FolderTier


@pytest.fixture
def files(tmp_path: Path) -> FolderFiles:
    return FolderFiles(tmp_path, IDENTITY)


def test_pages_that_have_left_the_memory_come_back_from_files(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    run_first(traffic)
    assert again(traffic) == 36
    settle(traffic)
    stats = traffic.scheduler.tier.snapshot().folder
    assert (stats.num_hits, stats.bytes_in) == (9, 9 * 512)
    assert (stats.num_bad, stats.num_failures) == (0, 0)
    assert stats.bytes_out > 20 * 512
    assert stats.num_bytes_used == stats.bytes_out // 512 * files.size_of(512)
    assert stats.seconds > 0


def test_a_later_engine_finds_them(files: FolderFiles, tmp_path: Path) -> None:
    run_first(make_traffic(files))
    later = make_traffic(FolderFiles(tmp_path, IDENTITY))
    assert again(later) == 36
    assert later.scheduler.tier.snapshot().folder.num_hits == 9


def test_more_pages_than_the_host_holds_come_back_in_turns(files: FolderFiles) -> None:
    traffic = make_traffic(files, slots=5)
    run_first(traffic)
    assert again(traffic) == 36


def test_states_come_back_with_their_pages(files: FolderFiles) -> None:
    traffic = make_traffic(files, num_states=6, state_slots=8)
    run_first(traffic)
    assert again(traffic) == 36
    later = make_traffic(FolderFiles(files.folder, IDENTITY), num_states=6)
    assert again(later) == 36


def test_pages_come_back_to_their_salt_only(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    run_first(traffic, cache_salt="salt")
    for number, (salt, cached) in enumerate(((None, 0), ("other", 0), ("salt", 36))):
        assert again(traffic, f"again-{number}", cache_salt=salt) == cached


def test_while_there_is_no_request_what_only_the_device_has_is_written(files: FolderFiles) -> None:
    traffic = make_traffic(files, num_pages=200)
    first = traffic.add("first", PROMPT, 4)
    traffic.run()
    assert folder_of(traffic).reach(first.page_hashes) == 0
    while traffic.scheduler.tier.save_one():
        pass
    assert folder_of(traffic).reach(first.page_hashes) == 10
    before = traffic.scheduler.tier.snapshot().folder.bytes_out
    assert not traffic.scheduler.tier.save_one()
    assert traffic.scheduler.tier.snapshot().folder.bytes_out == before, "each page is written once"
    assert len(traffic.scheduler.pages.host) == 0, "the host keeps no copies of what the device has"
    traffic.check()
    assert again(make_traffic(FolderFiles(files.folder, IDENTITY))) == 36


def test_closing_writes_what_only_the_device_has(files: FolderFiles) -> None:
    traffic = make_traffic(files, num_pages=200, num_states=6)
    traffic.add("first", PROMPT, 4)
    traffic.run()
    for lane in traffic.scheduler.tier.lanes:
        lane.copies.close = lambda: None
    traffic.scheduler.tier.close()
    assert again(make_traffic(FolderFiles(files.folder, IDENTITY), num_states=6)) == 36


def test_the_budget_holds_for_all_files(files: FolderFiles) -> None:
    """While there is no request, the newest pages are kept, and nothing is written twice."""
    budget = 20 * files.size_of(512)
    foreign = FolderFiles(files.folder, bytes([1] * 16))
    for number in range(5):
        foreign.write(FileName("page", bytes([number] * 16)), memoryview(bytes(512)))
    traffic = make_traffic(files, num_pages=200, budget=budget)
    assert traffic.scheduler.tier.snapshot().folder.num_bytes_used == 5 * files.size_of(512)
    seen = 0
    for _ in range(8):
        fill(traffic, 1)
        for _ in range(100):
            if not traffic.scheduler.tier.save_one():
                break
            seen = max(seen, sum(path.stat().st_size for path in files.folder.rglob("*.page")))
        else:
            pytest.fail("it does not end")
    folder_of(traffic).wait_for_writes(5.0)
    assert traffic.scheduler.tier.snapshot().folder.num_bytes_used <= budget
    assert 0 < seen <= budget
    assert not [*foreign.path_of(FileName("page", bytes(16))).parent.parent.rglob("*.page")], "the oldest went first"
    newest = [*traffic.sequences.values()][-1]
    assert folder_of(traffic).reach(newest.page_hashes) >= 10


def test_a_file_that_is_altered_is_computed_and_removed(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    hashes = run_first(traffic)
    path = files.path_of(folder_of(traffic).index.find("page", hashes[4]))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert again(traffic) == 16
    stats = traffic.scheduler.tier.snapshot().folder
    assert (stats.num_bad, stats.num_failures, stats.num_hits) == (1, 0, 4)
    settle(traffic)
    fill(traffic)
    assert again(traffic, "third") == 36, "it has been written again"


def test_files_that_another_process_has_removed_are_computed(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    run_first(traffic)
    for path in files.folder.rglob("*.page"):
        path.unlink()
    assert again(traffic) == 0
    stats = traffic.scheduler.tier.snapshot().folder
    assert (stats.num_bad, stats.num_failures, stats.num_hits) == (0, 0, 0)


@pytest.mark.slow
def test_files_of_another_process_are_found_and_those_that_are_gone_forgotten(files: FolderFiles, monkeypatch) -> None:
    monkeypatch.setattr(folder_tier, "SCAN_SECONDS", 0.0)
    traffic = make_traffic(FolderFiles(files.folder, IDENTITY))
    hashes = run_first(make_traffic(files))
    deadline = time.monotonic() + 20
    while folder_of(traffic).reach(hashes) < 9 and time.monotonic() < deadline:
        traffic.scheduler.tier.begin_step()
        time.sleep(0.01)
    assert again(traffic) == 36
    for path in files.folder.rglob("*.page"):
        path.unlink()
    while folder_of(traffic).index.num_bytes and time.monotonic() < deadline:
        traffic.scheduler.tier.begin_step()
        time.sleep(0.01)
    assert folder_of(traffic).reach(hashes) == 0


def test_new_weights_leave_the_folder(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    hashes = run_first(traffic)
    names = {path.name for path in files.folder.rglob("*.page")}
    traffic.scheduler.forget_cache(new_weights=True)
    assert again(traffic) == 0
    fill(traffic, 3)
    while traffic.scheduler.tier.save_one():
        pass
    assert folder_of(traffic).reach(hashes) == 0
    assert {path.name for path in files.folder.rglob("*.page")} == names, "nothing is written or removed"
    assert traffic.scheduler.tier.snapshot().folder.num_bytes == 0


def test_an_engine_that_has_slept_finds_its_files(files: FolderFiles) -> None:
    traffic = make_traffic(files)
    run_first(traffic)
    traffic.scheduler.forget_cache()
    assert again(traffic) == 36


def test_pages_that_are_not_finite_and_what_was_computed_from_them_lose_their_files(files: FolderFiles) -> None:
    traffic = make_traffic(files, num_pages=40, slots=30)
    hashes = run_first(traffic)
    traffic.add("broken", PROMPT[:18], 4)
    while not traffic.sequences["broken"].finished:
        traffic.step("not finite")
    folder_of(traffic).wait_for_writes(5.0)
    assert traffic.sequences["broken"].error.code == "not_finite"
    assert [folder_of(traffic).has("page", each) for each in hashes] == [False] * 9
    time.sleep(0.2)
    held = {path.name[:32] for path in files.folder.rglob("*.page")}
    assert not held & {each.hex() for each in hashes}
    assert again(make_traffic(FolderFiles(files.folder, IDENTITY))) == 0


def saved_history(files: FolderFiles, length: int = 75) -> list[bytes]:
    """A history whose pages have files, and are in the memory of no engine. Returns their hashes."""
    traffic = make_traffic(files, num_pages=100, slots=40, num_states=30, state_slots=30)
    sequence = traffic.add("history", prompt_of([0], length), 4)
    traffic.run()
    while traffic.scheduler.tier.save_one():
        pass
    return sequence.page_hashes


def test_an_abort_leaves_the_files_of_an_earlier_run(files: FolderFiles) -> None:
    """It comes while a step is in flight that is to complete a page: the file of this page, and of those after it, is right."""
    hashes = saved_history(files)
    paths = {path for kind in ("page", "state") for path in files.folder.rglob(f"*.{kind}")}
    traffic = make_traffic(FolderFiles(files.folder, IDENTITY), num_pages=100, slots=40, num_states=30, state_slots=30)
    sequence = traffic.add("again", prompt_of([0], 19), 40)
    while sequence.num_offered <= max(sequence.num_confirmed // 4, sequence.num_shared):
        traffic.step()
    assert sequence.page_hashes == hashes[: sequence.num_offered]
    traffic.scheduler.abort("again")
    assert not traffic.scheduler.pages.has(sequence.page_hashes[-1]), "nobody shares the page itself"
    folder_of(traffic).wait_for_writes(5.0)
    assert folder_of(traffic).reach(hashes) == len(hashes) == 19
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize("had_files", [False, True])
def test_what_a_preempted_sequence_has_left_goes_unless_it_was_there_before(files: FolderFiles, had_files: bool) -> None:
    """Its pages are written while it waits. Nothing has confirmed that they are finite when it is aborted."""
    if had_files:
        saved_history(files, 23)
    later = FolderFiles(files.folder, IDENTITY)
    traffic = make_traffic(later, num_pages=100, slots=40, num_states=30, state_slots=30)
    scheduler = traffic.scheduler
    folder = folder_of(traffic)
    folder.index.reach = lambda hashes: 0  # it computes what it could read
    sequence = traffic.add("long", prompt_of([0], 127), 4)
    batch = scheduler.schedule()
    traffic.device.launch(batch)
    scheduler._requeue(sequence)
    while scheduler.tier.save_one():
        pass
    before = [folder.has("page", each) for each in sequence.page_hashes]
    assert before == [True] * 16 + [False] * 16
    scheduler.abort("long")
    after = [folder.has("page", each) for each in sequence.page_hashes]
    assert after == [had_files] * 6 + [False] * 26
    assert len(folder.lacking(sequence.page_hashes[6:])) == 2 * 26, "nor is there a state"
    scheduler.check_integrity()
    folder.index.check_integrity()


class SlowRemovals(FolderFiles):
    """Removals wait for `gate`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IDENTITY)
        self.gate = threading.Event()

    def remove(self, name: FileName) -> None:
        assert self.gate.wait(20)
        super().remove(name)


@pytest.mark.parametrize("withdrawn_first", [False, True])
def test_a_scan_does_not_bring_back_what_is_withdrawn(files: FolderFiles, monkeypatch, withdrawn_first: bool) -> None:
    """Its file is still there while a scan walks the folder, because the removal waits behind others."""
    hashes = saved_history(files)
    monkeypatch.setattr(folder_tier, "FIRST_SCAN_SECONDS", 0.0)
    slow = SlowRemovals(files.folder)
    folder = FolderTier(slow, 1 << 30)
    traffic = make_traffic(files)
    folder.connect(folder_of(traffic)._lanes)
    folder._scan.result(20)
    folder._take_scan()
    assert folder.reach(hashes) == 19
    slow._known = {}  # as if it were the first scan
    if not withdrawn_first:
        folder._start_scan()
        folder._scan.result(20)
    folder.withdraw(hashes[7])
    if withdrawn_first:
        folder._start_scan()
        folder._scan.result(20)
    slow.gate.set()
    folder._writer.submit(lambda: None).result(20)
    folder._take_scan()
    assert folder.reach(hashes) == 7
    assert not any(folder.has("page", each) for each in hashes[7:])
    folder._start_scan()
    folder._scan.result(20)
    folder._take_scan()
    assert folder._removals == {}, "they are done"
    assert folder.reach(hashes) == 7
    folder.close()


class SlowWrites(FolderFiles):
    """Writes wait for `gate` when they have begun."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IDENTITY)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def write(self, name: FileName, data: memoryview) -> None:
        self.begun.set()
        assert self.gate.wait(20)
        super().write(name, data)


def test_closing_removes_what_is_withdrawn_and_writes_no_more(files: FolderFiles) -> None:
    """A write is on its way, others wait for it, and the removals behind them."""
    hashes = saved_history(files)
    slow = SlowWrites(files.folder)
    traffic = make_traffic(slow, num_pages=100, slots=40)
    folder = folder_of(traffic)
    slow.gate.clear()
    traffic.add("other", prompt_of([1], 39), 4)
    traffic.run()
    traffic.scheduler.tier.save_one()
    assert slow.begun.wait(20)
    assert len(folder._writes) > 1
    folder.withdraw(hashes[7])
    waiting = [write.future for write in folder._writes][1:]
    threading.Timer(0.1, slow.gate.set).start()
    folder.close()
    folder._writer.join(20)
    assert len([*files.folder.rglob("*.page")]) == 7 + 1
    assert not any(each.hex() == path.name[:32] for each in hashes[7:] for path in files.folder.rglob("*.page"))
    assert not any(future.done() for future in waiting)
