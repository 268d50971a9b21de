"""A raw ASGI connection to an application, for tests whose client does not read or disconnects."""

import asyncio
import json


class Connection:
    """A POST request. Its client stops reading while `reading` is clear, and `leave()` disconnects it."""

    def __init__(self, app, body, path="/v1/completions"):
        self.sent = []
        self.reading = asyncio.Event()
        self._left = asyncio.Event()
        self.reading.set()
        self._body = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent.append(message)
        await self.reading.wait()

    def leave(self):
        self._left.set()
