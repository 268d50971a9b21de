"""The load client, against a server of a few lines that counts its connections."""

import asyncio

import pytest
from fa_serve.server.bench import Load, _quantiles, run

EVENTS = [b'{"choices":[{"text":"a"}]}', b'{"usage":{"completion_tokens":1}}', b"[DONE]"]


async def report(header: bytes = b"", events: list[bytes] = EVENTS, cut: bool = False) -> tuple[dict, int]:
    """Of six requests, two at once, and how many connections they took."""
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


def test_quantiles_are_those_of_the_nearest_rank():
    found = _quantiles([number / 1000 for number in range(1, 101)])
    assert (found["p50"], found["p90"], found["p99"]) == (50, 90, 99)
    assert _quantiles([0.002, 0.001])["p50"] == 1
