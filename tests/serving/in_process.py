"""Requests to an application in this process, without sockets: the test decides what arrives, and what the client takes."""
import asyncio
import json
from typing import Any, NamedTuple


class Answered(NamedTuple):
    """The status of an answer and its body."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


async def never():
    """What does not come to an end by itself."""
    await asyncio.Event().wait()


async def ask(app, path, body=None, *, method="", arrives=True, takes=True, headers=()):
    """The answer to a request. `arrives`: whether its whole body does; `takes`: whether the client reads more than the head."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    parts, status, taken = [{"type": "http.request", "body": content, "more_body": not arrives}], [], []

    async def receive():
        return parts.pop() if parts else await never()

    async def send(message):
        if message["type"] == "http.response.start":
            status.append(message["status"])
        elif takes:
            taken.append(message.get("body", b""))
        else:
            await never()

    given = {"host": "localhost", "content-type": "application/json"} | dict(headers)
    path, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
             "method": method or ("GET" if body is None else "POST"), "path": path, "raw_path": path.encode(),
             "query_string": query.encode(), "headers": [(name.encode(), value.encode()) for name, value in given.items()],
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    await asyncio.wait_for(app(scope, receive, send), 60)
    return Answered(status[0] if status else 0, b"".join(taken))
