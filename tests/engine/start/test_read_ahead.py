"""The files of weights are asked for ahead of the loader: which files, which parts of them, and when not."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from fa_serve.demo import model_path
from fa_serve.engine import EngineConfig
from fa_serve.engine.start import read_ahead
from fa_serve.engine.start.loading import load_model
from fa_serve.engine.start.read_ahead import BLOCK_BYTES, BLOCKS_AT_A_TIME, reading_ahead

STEP = BLOCK_BYTES * BLOCKS_AT_A_TIME


@pytest.fixture
def asked(monkeypatch) -> dict[str, list[tuple[int, int]]]:
    """What is asked for, by the name of the file."""
    parts: dict[str, list[tuple[int, int]]] = {}

    def note(descriptor: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        parts.setdefault(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, []).append((start, size))

    monkeypatch.setattr(os, "posix_fadvise", note)
    return parts


def make_folder(folder: Path, **sizes: int) -> Path:
    """Files of these names and sizes, which are holes, and an index that names them."""
    for name, size in sizes.items():
        with (folder / f"{name}.safetensors").open("wb") as file:
            file.truncate(size)
    index = {"weight_map": {f"w{i}": f"{name}.safetensors" for i, name in enumerate(sizes)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_each_byte_is_asked_for_once(tmp_path, asked):
    with reading_ahead(make_folder(tmp_path, a=2 * STEP + 5, b=3)):
        pass
    for name, size in (("a.safetensors", 2 * STEP + 5), ("b.safetensors", 3)):
        starts = sorted(start for start, _ in asked[name])
        assert starts == list(range(0, -(-size // STEP) * STEP, BLOCK_BYTES))
        assert {count for _, count in asked[name]} == {BLOCK_BYTES}


def test_files_larger_than_the_memory_are_not_asked_for(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(read_ahead, "reclaimable_memory", lambda: STEP - 1)
    with reading_ahead(make_folder(tmp_path, a=STEP)):
        pass
    assert not asked


def test_a_load_that_fails_ends_the_reading(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, a=1000 * STEP)
    calls = []

    def fail_at_once() -> None:
        with reading_ahead(folder):
            raise ValueError("no model")

    monkeypatch.setattr(read_ahead, "reclaimable_memory", lambda: 1 << 50)
    monkeypatch.setattr(read_ahead, "_ask_for", lambda *part: (calls.append(part), time.sleep(0.01)))
    with pytest.raises(ValueError, match="no model"):
        fail_at_once()
    assert len(calls) < 100


@pytest.mark.parametrize("local_rank", [None, 0, 1])
def test_the_first_rank_of_a_machine_asks_for_the_weights_of_a_model(asked, local_rank):
    class OneRank:
        all_reduce = None
        device = torch.device("cpu")

    ranks = None
    if local_rank is not None:
        ranks = OneRank()
        ranks.local_rank = local_rank
    load_model(EngineConfig(device="cpu"), ranks)
    size = (model_path() / "model.safetensors").stat().st_size
    assert len(asked.get("model.safetensors", [])) == (0 if local_rank else -(-size // STEP) * BLOCKS_AT_A_TIME)


def test_pages_are_in_memory_afterwards(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(STEP))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with reading_ahead(tmp_path):
            pass
        for start in range(0, STEP, BLOCK_BYTES):
            # raises BlockingIOError for a page that is not in memory; the request may still be under way
            for attempt in range(100):
                try:
                    assert os.preadv(opened.fileno(), [bytearray(1)], start, os.RWF_NOWAIT) == 1
                    break
                except BlockingIOError:
                    assert attempt < 99
                    time.sleep(0.01)
