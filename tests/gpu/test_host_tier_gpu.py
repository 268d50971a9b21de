"""The host tier on a GPU: what comes back is what left, beside steps that overwrite it, and memory stays in its budget."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from hybrids import BY_NAME
from tiny_models import VOCAB, make_model
from transformers import GenerationConfig

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.cache import folder_tier, host_tier
from fa_serve.engine.runner import host_memory
from fa_serve.engine.runner.host_memory import HostMemory

GPU = torch.device("cuda")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def cache(num_pages: int, layers: int = 3) -> list[torch.Tensor]:
    """(num_pages, 16, 4, 64) in a GPU's order of dimensions."""
    make = torch.randn
    return [make(num_pages, 4, 16, 64, dtype=torch.bfloat16, device=GPU).transpose(1, 2) for _ in range(2 * layers)]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and pieces of few pages, so that a batch takes many turns."""
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 1 << 18)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1 << 20)


def test_rows_come_back_as_they_went(small_buffers) -> None:
    tensors = cache(200)
    memory = HostMemory(lambda: tensors, 16 << 20, GPU)
    memory.wait_until_pinned()
    assert memory.num_slots == (16 << 20) // memory.row_bytes
    draw = random.Random(0)
    for _ in range(5):
        rows = draw.sample(range(200), 150)
        slots = draw.sample(range(memory.num_slots), 150)
        before = [x[rows].clone() for x in tensors]
        memory.to_host(rows, slots).wait()
        others = draw.sample(range(200), 150)
        for x in tensors:
            x.normal_()
        kept = [row for row in range(200) if row not in others]
        untouched = [x[kept].clone() for x in tensors]
        memory.to_device(slots, others).wait()
        for x, expected, same in zip(tensors, before, untouched, strict=True):
            assert torch.equal(x[others], expected)
            assert torch.equal(x[kept], same)
    memory.close()


def test_copies_begin_after_the_steps_that_are_launched(small_buffers) -> None:
    """The page is written, and read, by work that is still queued when the copies are."""
    tensors = cache(64)
    memory = HostMemory(lambda: tensors, 8 << 20, GPU)
    memory.wait_until_pinned()
    rows = [*range(64)]
    a = torch.randn(6000, 6000, device=GPU)
    for number in range(3):
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        for x in tensors:
            x.fill_(number)
        leaving = memory.to_host(rows, rows)
        leaving.wait()
        for x in tensors:
            x.fill_(-1)
        for _ in range(10):
            a = (a @ a).clamp(-1, 1)
        sums = [x.float().sum() for x in tensors]
        arriving = memory.to_device(rows, rows)
        arriving.wait()
        assert all(x.float().sum() == number * x.numel() for x in tensors)
        assert all(each == -x.numel() for each, x in zip(sums, tensors, strict=True)), "the step has read what was there before"
    memory.close()


def test_queueing_copies_does_not_wait_for_the_device(no_synchronisation) -> None:
    tensors = cache(64)
    memory = HostMemory(lambda: tensors, 8 << 20, GPU)
    memory.wait_until_pinned()
    rows = [*range(64)]
    memory.to_host(rows, rows).wait()
    memory.to_device(rows, rows).wait()
    with no_synchronisation():
        leaving = memory.to_host(rows, rows)
        arriving = memory.to_device(rows, rows)
    leaving.wait()
    arriving.wait()
    memory.close()


def test_less_memory_is_a_smaller_tier_and_a_warning(small_buffers, monkeypatch, caplog) -> None:
    room = iter([host_memory.SPARE_BYTES + (2 << 20)] * 3 + [0] * 9)
    monkeypatch.setattr(host_memory, "reclaimable_memory", lambda: next(room))
    tensors = cache(64)
    with caplog.at_level(logging.WARNING, "fa_serve.engine"):
        memory = HostMemory(lambda: tensors, 8 << 20, GPU)
        memory.wait_until_pinned()
    assert 0 < memory.num_slots * memory.row_bytes <= 3 << 20
    assert "has 0.00" in caplog.text
    assert "GiB of the machine's memory are available" in caplog.text
    memory.close()


def test_a_driver_that_cannot_pin_leaves_no_tier(monkeypatch, caplog) -> None:
    class Refusing:
        def cudaHostRegister(self, *args: int) -> int:
            return 2

    monkeypatch.setattr(host_memory, "_cudart", Refusing)
    tensors = cache(8)
    memory = HostMemory(lambda: tensors, 8 << 20, GPU)
    memory.wait_until_pinned()
    assert memory.num_slots == 0
    assert "the driver could not pin the memory (CUDA error 2)" in caplog.text
    memory.close()


@pytest.mark.parametrize("kind", ["llama", "float8", "states"])
def test_tokens_are_those_of_an_engine_that_keeps_everything(kind: str) -> None:
    if kind == "states":
        model = BY_NAME["qwen3.5"].build(vocab_size=VOCAB)
        model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    else:
        model = make_model()
    model = model.to("cuda")
    draw = random.Random(0)
    given = [[draw.randrange(3, VOCAB) for _ in range(100)] for _ in range(6)]
    settings = {"device": "cuda", "max_model_len": 128, "max_num_batched_tokens": 128}
    settings |= {"kv_cache_dtype": "fp8"} if kind == "float8" else {}
    found = []
    for pages, host in ((512, 0), (24, 8 << 20)):
        engine = Engine(EngineConfig(num_pages=pages, kv_host_memory=host, **settings), model=model)
        if host:
            for lane in engine._scheduler.tier.lanes:
                lane.copies.wait_until_pinned()
        found.append([engine.generate([each], GREEDY)[0].token_ids for _ in range(3) for each in given])
        tier = engine.stats().host_tier
        engine.check_integrity()
        engine.close()
    assert found[0] == found[1]
    assert tier.num_hits > 20
    assert tier.num_failures == 0


@pytest.mark.parametrize("kind", ["llama", "states"])
def test_a_later_engine_finds_pages_in_files(tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Files are read to pinned memory, and come to the device from there. No page is given up because other tests keep the GPU
    or the disk busy."""
    monkeypatch.setattr(host_tier, "LONGEST_WAIT", 60.0)
    monkeypatch.setattr(folder_tier, "FIRST_SCAN_SECONDS", 60.0)
    monkeypatch.setattr(folder_tier, "LONGEST_READ", 60.0)
    model = make_model().to(GPU) if kind == "llama" else BY_NAME["qwen3.5"].build(vocab_size=VOCAB).to(GPU)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)
    draw = random.Random(0)
    length = 200 if kind == "llama" else 116  # of at most 256 and 128 tokens
    given = [[draw.randrange(3, VOCAB) for _ in range(length)] for _ in range(4)]
    settings = {"num_states": 6} if kind == "states" else {}
    found = []
    for _ in range(2):
        config = EngineConfig(
            device="cuda", num_pages=40, kv_host_memory=64 << 20, kv_host_folder=tmp_path, max_num_seqs=4, **settings
        )
        engine = Engine(config, model=model)
        for lane in engine._scheduler.tier.lanes:
            lane.copies.wait_until_pinned()
        found.append([(each.token_ids, each.num_cached_tokens) for x in given for each in engine.generate([x], GREEDY)])
        while engine.prepare_one():
            pass
        stats = engine.stats().host_tier
        assert (stats.num_failures, stats.folder.num_bad, stats.folder.num_failures) == (0, 0, 0)
        engine.close()
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    num_pages = length // 16
    assert {cached for _, cached in found[1]} == {16 * num_pages}
    assert stats.folder.num_hits == len(given) * num_pages
