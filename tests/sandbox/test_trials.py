"""A trial ends at its limits and when it is cancelled, and the next trial finds the process ready."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import llguidance
import pytest
from fa_serve.server.images import decode_process
from PIL import Image
from tiny_models import VOCAB, make_tokenizer
from trial_children import children_of, started

from fa_serve.engine.structured import grammar_process
from fa_serve.sandbox import trial_process
from fa_serve.sandbox import trials as module
from fa_serve.sandbox.trials import Cancelled, TrialError, TrialLimits, TrialProcessError, Trials, memory_settings

MATCHER = llguidance.LLMatcher
SHORT = json.dumps(MATCHER.grammar_from_regex("[a-f]{3}")).encode()


def request(grammar: str) -> bytes:
    return json.dumps(grammar).encode()


def slow(count: int = 6000) -> bytes:
    """A schema that takes seconds: with 6,000 properties ten of a processor on a slow machine, and with 2,000 one."""
    properties = {f"k{i}": {"type": "string"} for i in range(count)}
    return request(MATCHER.grammar_from_json_schema({"type": "object", "properties": properties}))


def error_of(trials: Trials, given: bytes) -> str:
    return json.loads(trials.trial().run(given))["error"]


@pytest.fixture
def make_trials():
    made = []

    def make(timeout: float = 30.0, memory: int = 256 << 20) -> Trials:
        given = {"tokenizer": make_tokenizer().backend_tokenizer.to_str(), "vocab_size": VOCAB, "end_ids": [1]}
        limits = TrialLimits("compile", timeout, memory, "grammar")
        made.append(Trials(grammar_process.__file__, given, limits, grammar_process.STACK))
        return made[-1]

    yield make
    for trials in made:
        trials.close()


@pytest.mark.slow
def test_limits_of_time_and_memory_are_named(make_trials) -> None:
    trials = make_trials(timeout=0.2)
    with pytest.raises(TrialError, match=r"within 0.2 seconds \(--grammar-timeout\)"):
        trials.trial().run(slow())
    trials = make_trials(memory=1 << 20)
    with pytest.raises(TrialError, match=r"within 1048576 bytes \(--grammar-memory\)"):
        trials.trial().run(slow())
    assert error_of(trials, SHORT) == ""


@pytest.mark.slow
def test_the_processors_time_of_the_work_is_told(make_trials) -> None:
    trial = make_trials().trial()
    assert trial.seconds == 0
    begin = time.monotonic()
    assert json.loads(trial.run(slow(2000)))["error"] == ""
    first = trial.seconds
    assert 0.2 < first < time.monotonic() - begin, "the schema takes a second"
    assert json.loads(trial.run(SHORT))["error"] == ""
    assert first < trial.seconds < time.monotonic() - begin, "that of all runs"
    trial = make_trials(timeout=0.3).trial()
    with pytest.raises(TrialError):
        trial.run(slow())
    assert 0.25 < trial.seconds < 5, "work that was ended counts as long as it was waited for"


@pytest.mark.slow
def test_runs_share_one_limit_of_time(held: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client had the whole limit for each of the runs that its request takes."""
    monkeypatch.setattr(held, "limits", TrialLimits("end", 2.0, 256 << 20, "test"))
    held.start()
    trial = held.trial()
    assert trial.run(b"second") == b"done\n"
    for next_one in (trial, trial.following()):
        begin = time.monotonic()
        with pytest.raises(TrialError, match="end within 2 seconds"):
            next_one.run(b"slow")
        assert 0.5 < time.monotonic() - begin < 1.5
    assert held.trial().run(b"second") == b"done\n", "another request has its own time"
    following = trial.following()
    assert following.seconds == 0


def test_errors_are_reported_and_cancelling_kills(make_trials) -> None:
    trials = make_trials()
    assert "unclosed" in error_of(trials, request(MATCHER.grammar_from_regex("[0-9")))
    trial = trials.trial()
    threading.Timer(0.3, trial.cancel).start()
    begin = time.monotonic()
    with pytest.raises(Cancelled):
        trial.run(slow())
    assert time.monotonic() - begin < 5
    trials.close()
    with pytest.raises(Cancelled):  # a thread that is late starts no process that nobody ends
        trials.trial().run(SHORT)
    assert trials._process is None


WORK = """
import os, pathlib, resource, signal, time

def prepare(given):
    folder = pathlib.Path(given["folder"])
    (folder / "starting").touch()
    while (folder / "hold").exists():
        time.sleep(0.01)

    def work(request, *files):
        for file in files:
            os.write(file, request[:1])
        if request == b"again\\n" and not (folder / "begun").exists():
            (folder / "begun").touch()
            time.sleep(60)
        if request == b"second\\n":
            time.sleep(1)
        if request == b"slow\\n":
            (folder / "pid").write_text(str(os.getpid()))
            (folder / "pid").rename(folder / "begun")
            time.sleep(60)
        if request == b"poor\\n":
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (32 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if request in (b"poor\\n", b"greedy\\n"):
            bytearray(1 << 30)
        if request == b"deadly\\n":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return b"done"

    return work
"""
"""Work that can be held while it is loaded, and that can die."""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Trials]:
    """Trials of WORK, whose process is not ready while the file `hold` is there."""
    path = tmp_path / "work.py"
    path.write_text(WORK)
    made = Trials(str(path), {"folder": str(tmp_path)}, TrialLimits("end", 30.0, 256 << 20, "test"))
    yield made
    (tmp_path / "hold").unlink(missing_ok=True)
    made.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_starts_too_late_is_ended(held: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half started, it would take the next requests, and their clients would be told that the work takes too long."""
    (tmp_path / "hold").touch()
    with monkeypatch.context() as patch:
        patch.setattr(module, "START_SECONDS", 1.0)
        with pytest.raises(TrialProcessError, match="the sandbox process for tests did not start within 1 seconds"):
            held.trial().run(b"x")
    assert held._process is None
    (tmp_path / "hold").unlink()
    assert held.trial().run(b"x") == b"done\n"


def test_a_process_that_cannot_load_its_work(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("raise SystemExit")
    broken = Trials(str(tmp_path / "work.py"), {}, TrialLimits("end", 30.0, 256 << 20, "test"))
    with pytest.raises(TrialProcessError, match=r"did not start$"):
        broken.trial().run(b"x")
    broken.close()


def test_a_start_ahead_of_the_first_trial(held: Trials) -> None:
    held.start()
    process = held._process
    assert process is not None
    assert held.trial().run(b"x") == b"done\n"
    held.start()
    assert held._process is process


def test_closing_does_not_wait_for_a_start(held: Trials, tmp_path: Path) -> None:
    """The event loop of a server closes, while a thread waits for the process."""
    (tmp_path / "hold").touch()
    thread, found = started(lambda: held.trial().run(b"x"))
    wait_for(tmp_path / "starting")
    begin = time.monotonic()
    held.close()
    assert time.monotonic() - begin < 2
    thread.join(5)
    assert [type(each) for each in found] == [Cancelled]
    assert held._process is None


def test_closing_cancels_what_runs(held: Trials, tmp_path: Path) -> None:
    thread, found = started(lambda: held.trial().run(b"slow"))
    wait_for(tmp_path / "begun")
    held.close()
    thread.join(5)
    assert [type(each) for each in found] == [Cancelled], "not that the work takes too much"


def test_closing_cancels_work_that_ends_before_its_process(held: Trials, tmp_path: Path) -> None:
    """A process that has to give back much memory is dead later than its child."""
    thread, found = started(lambda: held.trial().run(b"slow"))
    wait_for(tmp_path / "begun")
    held.closed = True
    os.kill(int((tmp_path / "begun").read_text()), signal.SIGKILL)
    thread.join(5)
    assert [type(each) for each in found] == [Cancelled], "not that the work takes too much"


def test_work_whose_process_dies_is_done_again(held: Trials, tmp_path: Path) -> None:
    """As with the OOM killer of the system, which chooses the process and not its child. The result begins where it began."""
    file = os.open(tmp_path / "shared", os.O_RDWR | os.O_CREAT)
    try:
        thread, found = started(lambda: held.trial().run(b"again", file))
        wait_for(tmp_path / "begun")
        process = held._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        thread.join(20)
        assert found == [b"done\n"]
        assert os.pread(file, 10, 0) == b"a"
    finally:
        os.close(file)


def test_work_whose_process_dies_each_time(held: Trials) -> None:
    with pytest.raises(TrialProcessError, match="the sandbox process for tests died 2 times"):
        held.trial().run(b"deadly")
    assert held.trial().run(b"x") == b"done\n"


def test_who_refuses_memory(held: Trials) -> None:
    """Our limit, which tells that the work takes too much; or the system, whose own limit is lower, as with `ulimit -v`."""
    trial = held.trial()
    with pytest.raises(TrialError) as error:
        trial.run(b"greedy")
    assert str(error.value) == f"end within {256 << 20} bytes (--test-memory)"
    assert trial.seconds < 1, "the processor's time, as of work that ends"
    with pytest.raises(TrialProcessError, match="the sandbox process for tests got no memory from the system"):
        held.trial().run(b"poor")
    assert held.trial().run(b"x") == b"done\n"


WHO = "import os\n\ndef prepare(given):\n    return lambda request: b'%d' % os.getpid()\n"


def spare_of(trials: Trials, used: set[int]) -> int:
    """The child that waits for its trial, as soon as there is one."""
    assert trials._process is not None
    for _ in range(2000):
        found = children_of(trials._process.pid) - used
        if found:
            [spare] = found
            return spare
        time.sleep(0.01)
    raise AssertionError("no child waits")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_the_child_of_the_next_trial_waits_for_it(tmp_path: Path) -> None:
    """Each child does one trial, and no trial waits for a fork. A child that the system ends while it waits is replaced."""
    work = tmp_path / "work.py"
    work.write_text(WHO)
    trials = Trials(str(work), {}, TrialLimits("end", 20.0, 64 << 20, "test"))
    trials.start()
    assert trials._process is not None
    process = trials._process.pid
    used: set[int] = set()
    try:
        for _ in range(3):
            spare = spare_of(trials, used)
            used.add(spare)
            assert int(trials.trial().run(b"")) == spare
        spare = spare_of(trials, used)
        os.kill(spare, signal.SIGKILL)
        while Path(f"/proc/{spare}").exists():
            time.sleep(0.01)
        assert int(trials.trial().run(b"")) != spare
        assert trials._process.pid == process
    finally:
        trials.close()


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["while-loading", "before"])
def test_a_process_whose_parent_ends_at_the_start_ends_quietly(tmp_path: Path, told: bool) -> None:
    """As when the engine's process is killed: the log has no error of its child."""
    work = tmp_path / "work.py"
    work.write_text(WHO)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, trial_process.__file__, str(theirs.fileno())]
        if told:
            ours.sendall(Trials(str(work), {}, TrialLimits("end", 20.0, 64 << 20, "test"))._start_line)
        ours.close()
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


FAULTS = """
import resource
def prepare(given):
    def work(request, file=None):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(3):  # what is freed is used again
            bytearray(b"x") * (16 << 20)
        return str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before).encode()
    return work
"""


def huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text() and "glibc" in platform.libc_ver()


@pytest.mark.skipif(not huge_pages(), reason="glibc, and a system with huge pages")
def test_memory_of_the_work_costs_few_page_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12,288 pages of 4 KiB are written to, 4,096 of them for the first time."""
    work = tmp_path / "work.py"
    work.write_text(FAULTS)

    def faults() -> int:
        trials = Trials(str(work), {}, TrialLimits("fault", 30.0, 256 << 20, "work"))
        try:
            return int(trials.trial().run(b"{}"))
        finally:
            trials.close()

    assert faults() < 1024
    monkeypatch.setattr(module, "memory_settings", lambda environment: {})
    assert faults() > 4096


def test_settings_of_the_user_for_memory_are_kept() -> None:
    told = memory_settings({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})["GLIBC_TUNABLES"]
    assert told.endswith(":glibc.malloc.hugetlb=0"), "the last one counts"
    assert memory_settings({})["GLIBC_TUNABLES"].endswith("=1073741824")


def test_work_that_leaves_no_memory_is_over_its_limit(tmp_path: Path) -> None:
    """A picture of 4,096 x 4,096 takes twice its limit. What Pillow frees afterwards still counts, so that nothing is left."""
    file = io.BytesIO()
    Image.new("RGB", (4096, 4096), "red").save(file, "JPEG")
    limits = TrialLimits("be decoded", 30.0, 64 << 20, "image")
    trials = Trials(decode_process.__file__, {"max_pixels": 1 << 24, "processor": None}, limits)
    try:
        with (tmp_path / "pixels").open("wb") as pixels, pytest.raises(TrialError, match=r"--image-memory"):
            trials.trial().run(base64.b64encode(file.getvalue()), pixels.fileno())
    finally:
        trials.close()
