"""The HTTP side: routes, the bearer token, limits, and clients that disconnect. It never waits for the device."""
import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from jaxrl_llm.files import expanded
from jaxrl_llm.generation.engine import Node
from jaxrl_llm.models import ModelConfig, weights
from jaxrl_llm.serving.answers import Answer
from jaxrl_llm.serving.http import check_token, error_body, handlers, read_json
from jaxrl_llm.serving.requests import Asked, Limits, Refused, read
from jaxrl_llm.serving.worker import Closed, Failure, Worker
from jaxrl_llm.tokenizers import Tokenizer

_ARRIVED = tuple[int, Node | Failure]  # index of the completion, and what arrived for it


class Served(NamedTuple):
    """The model and the settings of the server.

    Attributes:
      name: name of the model.  config, tokenizer: its architecture and tokenizer.  worker: runs it.
      token: token that clients must send; empty: none.
      limits: see `Limits`.
      weights_from: the folder from which published weights may be read; None: none may be published.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    worker: Worker
    token: str = ""
    limits: Limits = Limits()
    weights_from: Path | None = None


def make_app(served: Served) -> Starlette:
    """The application; it closes the worker when it ends."""
    server = _Server(served)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await asyncio.to_thread(served.worker.close)

    routes = [Route("/v1/completions", server.completions, methods=["POST"]),
              Route("/v1/chat/completions", server.chat, methods=["POST"]),
              Route("/v1/models", server.models), Route("/health", server.health),
              Route("/update_weights_from_disk", server.update_weights, methods=["POST"])]
    see = "GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers(see))


class _Server:
    """The answers to requests."""

    def __init__(self, served: Served):
        self.served, self.worker = served, served.worker
        self.open = 0  # requests that are being answered
        self.loading = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """200 as long as the engine runs; needs no token."""
        alive = self.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        self.check(request)
        return JSONResponse({"object": "list", "data": [{
            "id": self.served.name, "object": "model", "created": 0, "owned_by": "jaxrl_llm",
            "max_model_len": self.worker.slot_tokens, "metadata": {"weight_version": self.worker.tag}}]})

    async def completions(self, request: Request) -> Response:
        return await self.sampled(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self.sampled(request, chat=True)

    async def update_weights(self, request: Request) -> Response:
        """Uses weights from a directory from the next chunk on; answers once they are in use."""
        self.check(request)
        body = await self.body(request)
        known = {"model_path", "weight_version"}
        if not isinstance(body, dict) or body.keys() != known or not all(
                isinstance(x, str) and x.isprintable() for x in body.values()):
            raise Refused(f"the body is {str(body)[:200]}; give {{'model_path': DIRECTORY, 'weight_version': NAME}}, both of "
                          "printable characters")
        directory = self.allowed(body["model_path"])
        async with self.loading:  # one at a time: each holds one more copy of all weights
            try:
                config, params = await asyncio.to_thread(weights.load, directory)
                if config != self.served.config:
                    raise ValueError(f"{directory} holds a model of another architecture than the one that is served")
                await asyncio.wrap_future(self.worker.publish(body["weight_version"], params))
            except (OSError, ValueError) as error:
                raise Refused(str(error), "model_path") from error
        return JSONResponse({"success": True, "message": f"serving {body['weight_version']}",
                             "weight_version": body["weight_version"]})

    def allowed(self, path: str) -> Path:
        """The directory, if weights may be read from there."""
        folder = self.served.weights_from
        if folder is None:
            raise Refused("this server takes no other weights; start it with --weights_from=FOLDER", status=403)
        try:
            directory = expanded(path).resolve()
        except ValueError as error:  # an unknown user, a NUL
            raise Refused(str(error), "model_path") from error
        if not directory.is_relative_to(folder.resolve()):
            raise Refused(f"model_path={path!r} does not lie in {folder}, from where this server takes weights", "model_path",
                          403)
        return directory

    # --- a request for completions ------------------------------------------------------------------------------------------

    async def sampled(self, request: Request, chat: bool) -> Response:
        """A whole answer, or a stream; a client that disconnects frees its rows."""
        self.check(request)
        served = self.served
        if self.open >= served.limits.requests:
            raise Refused(f"{self.open} requests are being answered, the most that this server allows; try again later",
                          status=429, code="rate_limit_exceeded")
        self.open += 1
        try:
            body = await self.body(request)
            asked = await asyncio.to_thread(read, body, chat, served.tokenizer, self.worker.vocab_size,
                                            self.worker.slot_tokens, served.name, served.limits)
            answer, rows = Answer(asked, served.tokenizer, served.name, self.worker.tags), _Rows(self.worker, asked)
            await rows.start()
        except BaseException:
            self.open -= 1
            raise
        if asked.stream:
            return _Events(self.streamed(asked, answer, rows), lambda: self.end(rows))
        try:
            nodes = await _unless_gone(request.receive, rows.whole())
            return JSONResponse(answer.whole(nodes, self.worker.tag))
        finally:
            self.end(rows)

    async def streamed(self, asked: Asked, answer: Answer, rows: "_Rows") -> AsyncIterator[str]:
        """Sends events as tokens arrive. An error is an event too, since the status has already been sent."""
        try:
            left = len(answer.completions)
            while left:
                index, node = await rows.next()
                left -= node.finish != "running"
                yield _event(answer.chunk(index, node, self.worker.tag))
            if asked.usage:
                yield _event(answer.last(self.worker.tag))
            yield "data: [DONE]\n\n"
        except Failure as error:
            yield _event(error_body(str(error), 500))

    def end(self, rows: "_Rows") -> None:
        """Cleans up after a request, however it ended."""
        self.open -= 1
        rows.release()

    # --- what every request goes through ------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Checks the bearer token."""
        token = self.served.token
        check_token(request.headers.get("authorization", ""), token and f"Bearer {token}", "Authorization: Bearer TOKEN")

    async def body(self, request: Request) -> Any:
        """The JSON of the body."""
        return await read_json(request, self.served.limits.body)


class _Events(StreamingResponse):
    """A stream of events; `done` is called at its end, even if the client disconnected before it began."""

    def __init__(self, events: AsyncIterator[str], done: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._done = done

    async def __call__(self, scope, receive, send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, OSError):
                await _unless_gone(receive, self.stream_response(send))
        finally:
            self._done()


class _Rows:
    """The rows of one request, whose tokens come from the engine's thread into a queue of this event loop."""

    def __init__(self, worker: Worker, asked: Asked):
        self._worker, self._asked, self._loop = worker, asked, asyncio.get_running_loop()
        self._queue: asyncio.Queue[_ARRIVED] = asyncio.Queue()
        self._uids: list[int] = []

    async def start(self) -> None:
        """Queues the rows. Raises `Refused` for rows that the engine refuses."""
        requests = self._asked.requests

        def listener(index):
            def listen(event):
                with contextlib.suppress(RuntimeError):  # the loop has ended, and so have its clients
                    self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
            return listen

        future = self._worker.submit(requests, [listener(i) for i in range(len(requests))])
        try:
            self._uids = await asyncio.shield(asyncio.wrap_future(future))
        except ValueError as error:
            raise Refused(str(error)) from None
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._worker.release(done.result()) if not done.exception() else None)
            raise

    async def next(self) -> tuple[int, Node]:
        """The next completion that has news, and its node. Raises `Failure`."""
        index, event = await self._queue.get()
        if isinstance(event, Failure):
            raise event
        return index, event

    async def whole(self) -> list[Node]:
        """All completions, one node each, in order."""
        parts: list[list[Node]] = [[] for _ in self._uids]
        left = len(parts)
        while left:
            index, node = await self.next()
            parts[index].append(node)
            left -= node.finish != "running"
        return [joined(nodes) for nodes in parts]

    def release(self) -> None:
        """Frees the slots of rows that are still running."""
        with contextlib.suppress(Closed):
            self._worker.release(self._uids)


def joined(nodes: list[Node]) -> Node:
    """Successive pieces of a completion as one."""
    whole: dict[str, Any] = {name: np.concatenate([getattr(node, name) for node in nodes])
                             for name in ("tokens", "logprobs", "entropies", "policy_version")}
    return dataclasses.replace(nodes[0], finish=nodes[-1].finish, **whole)


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`; raises ClientDisconnect if the client disconnects first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
