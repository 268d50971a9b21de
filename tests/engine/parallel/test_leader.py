"""Two ranks as processes: the tokens of one rank, lockstep under random traffic, and every way to lose a rank.

A fresh follower takes seconds to start. The test of ranks whose parent ends has such a follower, and the others forked ones.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_families import BY_NAME, VOCAB
from server_process import one_layer
from streams import collect, until
from warm_processes import MODULE_NAME, warm_program, with_warm_followers

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, EngineDeadError, RequestError, SamplingParams
from fa_serve.engine.parallel import links
from fa_serve.engine.parallel.leader import Leader, open_ranks
from fa_serve.engine.process import engine_process
from fa_serve.engine.request.params import StructuredOutput
from fa_serve.engine.runner.results import PendingResult
from fa_serve.spec import ParameterError, UnsupportedModelError

ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


def followers() -> list[int]:
    """Process ids of followers that run on this machine for this test process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
                name = (folder / "comm").read_text().strip()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                ours = MARK.encode() in (folder / "environ").read_bytes()
            except OSError:  # it has ended, or belongs to another user
                continue
            is_follower = b"fa_serve.engine.parallel.follower_main" in command or name == MODULE_NAME
            if is_follower and state != "Z" and ours:
                found.append(int(folder.name))
    return found


MARK = f"FA_SERVE_TEST_RANKS={os.getpid()}"
os.environ[MARK.partition("=")[0]] = MARK.partition("=")[2]  # before there are forked processes, which have it too


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while followers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not followers(), "a follower is left behind"


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": one_layer(), "device": "cpu", "dtype": "float32", "seed": 3, "page_size": 8, "num_pages": 40} | settings
    )


MIXED: list[tuple[str, SamplingParams]] = [
    ("Once upon a time", SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, logprobs=2)),
    ("Once upon a time", SamplingParams(max_tokens=12, n=2, temperature=1.1, top_k=30, seed=4)),
    ("one two three one two three one two", SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.1)),
    ("a list: a, b, c, a, b, c, a, b", SamplingParams(max_tokens=24, temperature=0.0, stop=("c,",), prompt_logprobs=1)),
    ("The answer is ", SamplingParams(max_tokens=12, structured=StructuredOutput(regex="[0-9]{3}-[a-f]{2}"))),
    ("Yes or no? ", SamplingParams(max_tokens=8, structured=StructuredOutput(choice=("yes", "no")), temperature=0.5)),
]


def answers(engine: Engine, about: Any = list) -> list[Any]:
    """Tokens, texts, reasons and log-probabilities. There are too few pages for all, so some are preempted.

    about: what log-probabilities are compared as; ranks add in another order
    """
    prompts = [prompt for prompt, _ in MIXED]
    rounds = []
    for _ in range(2):  # the second time from the prefix cache
        for each in engine.generate(prompts, [params for _, params in MIXED]):
            logprobs = about([entry.logprob for entry in each.logprobs or []])
            rounds.append((each.token_ids, each.text, each.finish_reason, logprobs))
    engine.check_integrity()
    return rounds


@pytest.mark.usefixtures("warm_followers")
def test_two_ranks_answer_as_one_and_stay_in_step() -> None:
    settings = {"speculative": "ngram", "num_pages": 14}
    one = Engine(config(**settings))
    expected = answers(one, partial(pytest.approx, abs=1e-3))
    one.close()
    two = Engine(config(tensor_parallel=2, **settings))
    assert two.config.num_pages == one.config.num_pages
    assert answers(two) == expected
    assert two.stats() == one.stats()
    assert two.stats().num_preemptions > 0
    _fuzz(two, random.Random(5), steps=30)
    [link] = two._ranks._links
    two.close()
    assert link.process.returncode == 0, "the follower has checked its integrity, and ended without an error"


def _fuzz(engine: Engine, draw: random.Random, steps: int, vocab: int = 300) -> None:
    """Random requests, aborts and timeouts. A follower that schedules or samples something else ends."""
    names: list[str] = []
    for step in range(steps):
        for _ in range(draw.randrange(3)):
            names.append(f"fuzz-{step}-{len(names)}")
            params = SamplingParams(max_tokens=draw.randint(1, 30), n=draw.randint(1, 2), temperature=draw.choice([0.0, 1.0]))
            prompt = [draw.randrange(vocab) for _ in range(draw.randint(1, 20))]
            timeout = draw.choice([None, 0.02, 60.0])
            engine.add_request(
                names[-1], prompt, params, timeout=timeout, client=draw.choice("ab"), priority=draw.randint(-2, 2)
            )
        if names and not draw.randrange(4):
            engine.abort(names.pop(draw.randrange(len(names))))
        engine.step()
        engine.check_integrity()
    _run(engine)


def _run(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_followers")
def test_a_mixture_of_a_folder_in_deterministic_mode_on_two_ranks(tmp_path: Path) -> None:
    """How each family is divided is shown by tests/hf/surgery/divide/test_weights.py, with ranks that are threads."""
    BY_NAME["qwen3-moe"].build().save_pretrained(tmp_path)
    _copy_tokenizer(tmp_path)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=t) for t in (0.0, 1.0, 0.0)]
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [3]]
    results = []
    for size in (1, 2):
        engine = Engine(config(model=tmp_path, tensor_parallel=size, deterministic=True))
        results.append([(x.token_ids, x.text, x.finish_reason) for _ in range(2) for x in engine.generate(prompts, params)])
        results[-1].append(engine.stats())
        if size == 2:
            _fuzz(engine, random.Random(5), steps=10, vocab=VOCAB)
        engine.check_integrity()
        engine.close()
    assert results[0] == results[1]


def _copy_tokenizer(folder: Path) -> None:
    from tiny_models import make_tokenizer

    make_tokenizer().save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_followers")
def test_what_ends_two_ranks_of_one_process() -> None:
    """A digest that differs, and a step that fails on rank 0 alone. Each is one error, and a new pair may start."""
    engine = Engine(config(tensor_parallel=2))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine._ranks.add_to_digest([1])
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 failed: .* from rank 0's before step 2: the ranks are out of step"):
        _run(engine)
    engine.close()
    lost: list[EngineDeadError] = []
    threads = torch.get_num_threads()
    engine = Engine(config(tensor_parallel=2), on_lost=lost.append)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()

    def fail(batch: object) -> None:
        raise torch.OutOfMemoryError("no room")

    engine._runner.launch = fail  # type: ignore[method-assign, assignment]
    for call in (engine.step, engine.step, lambda: engine.abort("a")):
        with pytest.raises(EngineDeadError, match="rank 0 of 2 failed: OutOfMemoryError: no room"):
            call()
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 20, "a follower that waits in a sum is not waited for"
    with pytest.raises(EngineDeadError, match="rank 0 of 2 failed"):
        engine.step()
    assert not lost, "the follower was ended by rank 0"
    assert torch.get_num_threads() == threads


def test_a_step_that_was_interrupted_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a step of rank 0 and not of the others, whose sums would meet those of its next step."""
    leader = Leader(config(tensor_parallel=2))
    monkeypatch.setattr(leader, "_send", lambda *message: None)
    leader.tell("step")
    leader.end_step()
    leader.tell("abort", "a")
    leader.tell("step")
    for call in ("step", "abort"):
        with pytest.raises(EngineDeadError, match="a step was interrupted: the ranks are out of step"):
            leader.tell(call)


def test_followers_of_an_interrupted_step_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait in a sum that rank 0 never comes to."""
    leader = Leader(config(tensor_parallel=2))
    sent: list[str] = []
    monkeypatch.setattr(leader, "_send", lambda what, _: sent.append(what))
    leader.tell("step")
    leader.close()
    assert sent == ["step"]
    other = Leader(config(tensor_parallel=2))
    monkeypatch.setattr(other, "_send", lambda what, _: sent.append(what))
    other.tell("step")
    other.end_step()
    other.close()
    assert sent == ["step", "step", "stop"]


def test_tokens_of_an_aborted_sum_are_no_output(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the sums of a step return with undefined values when a rank is lost."""
    leader = Leader(config(tensor_parallel=2))
    engine = make_engine(ranks=leader)
    engine.add_request("a", [1, 2, 3], ENDLESS)
    lost = EngineDeadError("rank 1 of 2 ended with exit code -9")
    read = PendingResult.read

    def read_late(pending: PendingResult) -> Any:
        leader.lose(lost)
        return read(pending)

    monkeypatch.setattr(PendingResult, "read", read_late)
    with pytest.raises(EngineDeadError, match="ended with exit code -9"):
        engine.step()
    assert engine._scheduler.sequences["a"].num_output_tokens == 0


FAULT = """
import torch.distributed
def fail(*args, **kwargs):
    raise OSError("no port")
torch.distributed.TCPStore = fail
"""


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("warm_followers")
def test_a_follower_that_cannot_join_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for it for half an hour, and the error says why it ended."""
    monkeypatch.setattr(links.subprocess, "Popen", partial(links.subprocess.Popen, fault=FAULT))
    with pytest.raises(EngineDeadError, match="rank 1 of 2 failed: OSError: no port"):
        open_ranks(config(tensor_parallel=2))


def test_calls_of_closed_ranks_fail_at_once() -> None:
    leader = Leader(config(tensor_parallel=2))  # its follower has ended
    leader.close()
    begin = time.monotonic()
    for call in ("submit", "step", "abort"):
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            leader.tell(call)
    assert time.monotonic() - begin < 20


@pytest.mark.usefixtures("warm_followers")
def test_settings_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_engine: Any) -> None:
    with pytest.raises(ParameterError, match="tensor_parallel must be a positive integer, got 0"):
        config(tensor_parallel=0)
    with pytest.raises(ParameterError, match="be 1 for a model that is already loaded, got 2"):
        make_engine(tensor_parallel=2)
    with pytest.raises(ParameterError, match="device must be auto, cpu or cuda with tensor_parallel"):
        open_ranks(config(tensor_parallel=2, device="cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ParameterError, match="tensor_parallel must be at most 1, the number of GPUs, got 2"):
        open_ranks(config(tensor_parallel=2, device="cuda"))
    assert config(tensor_parallel=2, device="cuda").device_of(1) == "cuda:1"
    assert config(device="cuda").device_of(0) == "cuda"
    BY_NAME["gpt2"].build().save_pretrained(tmp_path)
    _copy_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot be divided between 2 ranks"):
        Engine(config(model=tmp_path, tensor_parallel=2))


@pytest.fixture
def warm_ranks(warm_context: ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of engines find everything imported, and so do their followers."""

    def process(target: Callable[..., None], **options: Any) -> Any:
        return warm_context.Process(target=partial(with_warm_followers, target), **options)

    context = SimpleNamespace(Pipe=warm_context.Pipe, Process=process)
    monkeypatch.setattr(engine_process, "multiprocessing", SimpleNamespace(get_context=lambda _: context))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_killed_rank_ends_every_request_and_is_replaced() -> None:
    """First rank 1, which is replaced, and then rank 0."""

    async def main() -> None:
        engine = AsyncEngine(config(tensor_parallel=2, process=True, max_restarts=1, num_pages=800))
        await engine.start()
        for cause, end in (("rank 1 of 2", "; it is being restarted"), ("its process", "")):
            tasks = [asyncio.create_task(collect(engine, "Once upon a time", ENDLESS, name=f"r{i}")) for i in range(3)]
            await until(lambda: engine.stats().num_running == 3)
            [process] = multiprocessing.active_children()
            [follower] = followers()
            os.kill(follower if end else process.pid, signal.SIGKILL)
            begin = time.monotonic()
            outputs = [(await task)[-1] for task in tasks]
            assert time.monotonic() - begin < 5
            assert [output.finish_reason for output in outputs] == ["error"] * 3
            reason = RequestError("engine_dead", f"the engine has ended: {cause} ended with exit code -9{end}")
            assert [output.error for output in outputs] == [reason] * 3
            await until(lambda: not engine.is_restarting, 60)
            assert engine.is_alive == bool(end)
        with pytest.raises(EngineDeadError, match="its process ended with exit code -9"):
            await collect(engine, "Once upon a time")
        await engine.shutdown()

    asyncio.run(main())


PARENT = """
import asyncio, sys
from warm_processes import fork_engines
from fa_serve.engine import AsyncEngine, EngineConfig, SamplingParams
async def main():
    engine = AsyncEngine(EngineConfig(model=sys.argv[1], device="cpu", tensor_parallel=2, process=True, num_pages=800))
    await engine.start()
    async for output in engine.generate("Once", SamplingParams(max_tokens=1500, ignore_eos=True), "a"):
        sys.stdout.write("x")
        sys.stdout.flush()
if __name__ == "__main__":
    fork_engines()
    asyncio.run(main())
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them() -> None:
    """The follower is a fresh interpreter, as that of a user is."""
    with warm_program(PARENT, one_layer()) as parent:
        assert parent.stdout.read(2) == "xx"
        assert len(followers()) == 1
        parent.kill()  # the fixture waits for the follower
