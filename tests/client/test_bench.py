"""The load of `fa-serve bench`, against a real server and against a server of a few lines that counts its connections."""

import asyncio
import json
import random
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fa_serve.__main__ import app
from fa_serve.client.bench import Load, LoadError, _body, run

EVENTS = [b'{"choices":[{"text":"a"}]}', b'{"usage":{"completion_tokens":1}}', b"[DONE]"]


async def report(header: bytes = b"", events: list[bytes] = EVENTS, cut: bool = False) -> tuple[dict, int]:
    """The report of six requests, two at once, and the number of connections that they took."""
    connections = 0

    async def answer(reader, writer):
        nonlocal connections
        connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + header + b"\r\n")
                for event in events:
                    body = b"data: " + event + b"\n\n"
                    writer.write(b"%x\r\n%s\r\n" % (len(body), body))
                    await asyncio.sleep(0)
                if cut:
                    break
                writer.write(b"0\r\n\r\n")
                if header:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        load = Load(url=f"http://{host}:{port}", model="m", requests=6, concurrency=2, warmup=0)
        found = await asyncio.wait_for(run(load), 20)
        await asyncio.sleep(0.05)  # the server sees that the client has closed
        return found, connections


@pytest.mark.parametrize(("header", "connections"), [(b"", 2), (b"connection: close\r\n", 6)], ids=["kept", "closed"])
def test_a_connection_is_used_again_if_the_server_keeps_it(header, connections):
    found, made = asyncio.run(report(header))
    assert (found["failed"], made) == (0, connections), found


def test_an_answer_that_is_cut_off_has_failed():
    found, _ = asyncio.run(report(events=EVENTS[:1], cut=True))
    assert (found["failed"], found["errors"]) == (6, ["the stream ended without [DONE]"])


def test_lengths_are_drawn_around_their_means():
    rng = random.Random(0)
    bodies = [json.loads(_body(Load(model="m", prompt_tokens=100, output_tokens=10, spread=0.8), rng)) for _ in range(300)]
    lengths = [len(body["prompt"]) for body in bodies]
    assert 20 <= min(lengths) < 25
    assert 175 < max(lengths) <= 180
    assert {body["max_tokens"] for body in bodies} == set(range(2, 19))
    [fixed] = {len(json.loads(_body(Load(model="m"), rng))["prompt"]) for _ in range(9)}
    assert fixed == 128


@pytest.mark.slow
def test_the_command_writes_a_report(served, tmp_path):
    load = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20", "--output-tokens", "5", "--processes", "2"]
    command = [sys.executable, "-m", "fa_serve", "bench", "--url", served.url, *load, "--json", str(tmp_path / "report.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fa-serve-demo: 12 of 12 requests" in done.stdout
    report = json.loads((tmp_path / "report.jsonl").read_text())
    assert (report["requests"], report["failed"], report["model"]) == (12, 0, "fa-serve-demo")
    assert report["output_tokens_per_s"] == pytest.approx(60 / report["seconds"], rel=0.01)
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] <= report["e2e_ms"]["p99"]


def test_the_command_fails_if_the_server_refuses(served):
    refused = CliRunner().invoke(app, ["bench", "--url", served.url, "--prompt-tokens", "5000"])
    assert refused.exit_code == 1
    assert "context length" in refused.stderr


def test_a_server_that_cannot_be_reached():
    with pytest.raises(LoadError, match=r"127\.0\.0\.1:1"):
        asyncio.run(run(Load(url="http://127.0.0.1:1")))
