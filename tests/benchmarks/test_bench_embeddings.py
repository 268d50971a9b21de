"""The benchmark of embeddings runs from start to end on a CPU, and refuses vectors that are wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from sampled_cases import whole_runs

from benchmarks.engine import bench_embeddings
from fa_serve.engine import Encoder, EngineConfig

FLAGS = ["--shapes", "tiny", "--lengths", "8", "--clients", "2", "--requests", "4", "--total", "256", "--rounds", "1"]


@whole_runs
def test_every_case_has_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.engine.bench_embeddings", *FLAGS, "--dtype", "float32", "--device", "cpu"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "embeddings.jsonl").read_text().splitlines()]
    assert {line["case"] for line in lines} == {"tiny offline 8", "tiny few 8", "tiny http 8 x 2", "tiny p99 8 x 2"}
    assert all(line["bench"] == "embeddings" and line["ours"] > 0 for line in lines)


def test_a_peer_that_does_not_start_is_named(tmp_path: Path) -> None:
    args = argparse.Namespace(peer_path=str(tmp_path / "nothing"), dtype="float32", out=tmp_path)
    with pytest.raises(RuntimeError, match="not ready after"), bench_embeddings.vllm(args, tmp_path):
        pytest.fail("there is no such server")


def test_a_client_opens_a_connection_again_that_a_server_has_closed() -> None:
    """vLLM's closes what is idle for 5 s, here for 0.1 s."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            while await asyncio.wait_for(reader.readuntil(b"}"), 0.1):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        await writer.wait_closed()

    async def run() -> bench_embeddings.Load:
        load = bench_embeddings.Load()
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pauses = iter([0.0, 0.0, 0.5])
            await bench_embeddings.ask(f"http://127.0.0.1:{port}", iter([b"{}"] * 3), load, lambda: next(pauses))
            await asyncio.sleep(0.2)  # both sides close
        return load

    assert len(asyncio.run(run()).seconds) == 3
    assert connections >= 2


def test_texts_have_exactly_their_tokens_and_wrong_vectors_end_the_run(tmp_path: Path) -> None:
    folder = bench_embeddings.make_folder("tiny", tmp_path, "float32")
    encoder = Encoder(EngineConfig(model=folder, device="cpu", dtype="float32"))
    assert [len(each.ids) for each in encoder.reader.read(bench_embeddings.texts_of(3, 16))] == [16] * 3
    bench_embeddings.check(folder, encoder, "float32")
    encoder._pipeline.model.base.get_input_embeddings().weight.data[7:300] = 1.0
    with pytest.raises(SystemExit, match="cosine distance"):
        bench_embeddings.check(folder, encoder, "float32")
