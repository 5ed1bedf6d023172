"""The HTTP side: routes, the bearer token, limits, and clients that disconnect. It never waits for the device."""
import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from jaxrl_llm.engines.engine import Node
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.serving.answers import Answer
from jaxrl_llm.serving.http import admit, error_body, handlers, in_thread, read_json, within
from jaxrl_llm.serving.policy import weights_of
from jaxrl_llm.serving.requests import ClientLimits, CompletionRequest, RequestError, read, unserved
from jaxrl_llm.serving.worker import Closed, Failure, Worker
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.tokenizers.messages import shown
from jaxrl_llm.tools.files import expanded

_ARRIVED = tuple[int, Node | Failure]  # index of the completion, and what arrived for it


class ServedModel(NamedTuple):
    """The model and the settings of the server.

    Attributes:
      name: name of the model.  config, tokenizer: its architecture and tokenizer.  worker: runs it.
      token: token that clients must send; empty: none.
      limits: see `ClientLimits`.
      weights_from: the folder from which published weights may be read; None: none may be published.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    worker: Worker
    token: str = ""
    limits: ClientLimits = ClientLimits()
    weights_from: Path | None = None


def make_app(served: ServedModel) -> Starlette:
    """The application; it closes the worker when it ends."""
    server = _Server(served)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await asyncio.to_thread(served.worker.close)

    routes = [Route("/v1/completions", server.completions, methods=["POST"]),
              Route("/v1/chat/completions", server.chat, methods=["POST"]),
              Route("/v1/models", server.models), Route("/v1/models/{name:path}", server.model),
              Route("/health", server.health), Route("/update_weights_from_disk", server.update_weights, methods=["POST"])]
    see = "GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers(see))


class _Server:
    """The answers to requests."""

    def __init__(self, served: ServedModel):
        self.served, self.worker = served, served.worker
        self.open = 0  # requests that are being answered
        self.loading = asyncio.Lock()

    async def health(self, request: Request) -> Response:
        """200 as long as the engine runs; needs no token."""
        alive = self.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        self.check(request)
        return JSONResponse({"object": "list", "data": [self.described()]})

    async def model(self, request: Request) -> Response:
        """The model by its name; 404 for another one."""
        self.check(request)
        if (name := request.path_params["name"]) != self.served.name:
            raise unserved(name, self.served.name)
        return JSONResponse(self.described())

    def described(self) -> dict[str, Any]:
        """The model as OpenAI describes one."""
        return {"id": self.served.name, "object": "model", "created": 0, "owned_by": "jaxrl_llm",
                "max_model_len": self.worker.slot_tokens, "metadata": {"weight_version": self.worker.tag}}

    async def completions(self, request: Request) -> Response:
        return await self.sampled(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self.sampled(request, chat=True)

    async def update_weights(self, request: Request) -> Response:
        """Uses weights from a directory from the next chunk on; answers once they are in use."""
        self.check(request)
        body = await read_json(request, self.served.limits)
        known = {"model_path", "weight_version"}
        if not isinstance(body, dict) or body.keys() != known or not all(
                isinstance(x, str) and x.isprintable() for x in body.values()):
            raise RequestError(f"the body is {shown(body)}; give {{'model_path': DIRECTORY, 'weight_version': NAME}}, both of "
                               "printable characters")
        directory = self.allowed(body["model_path"])
        with self.place():
            async with self.loading:  # one at a time: each holds one more copy of all weights
                try:
                    config, params = await within(self.served.limits.stalled,
                                                  in_thread(weights_of, directory, self.worker.mesh))
                    if config != self.served.config:
                        raise ValueError(f"{directory} holds a model of another architecture than the one that is served")
                    await within(self.served.limits.stalled,
                                  asyncio.wrap_future(self.worker.publish(body["weight_version"], params)))
                except (OSError, ValueError) as error:
                    raise RequestError(str(error), "model_path") from error
        return JSONResponse({"success": True, "message": f"serving {body['weight_version']}",
                             "weight_version": body["weight_version"]})

    def allowed(self, path: str) -> Path:
        """The directory, if weights may be read from there."""
        folder = self.served.weights_from
        if folder is None:
            raise RequestError("this server takes no other weights; start it with --weights_from=FOLDER", status=403)
        try:
            directory = expanded(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # an unknown user, links in a circle
            raise RequestError(f"model_path={shown(path)}: {error}", "model_path") from None
        if not directory.is_relative_to(folder.resolve()):
            raise RequestError(f"model_path={shown(path)} does not lie in {folder}, from where this server takes weights",
                               "model_path", 403)
        return directory

    # --- a request for completions ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One of the requests that are answered at a time. Raises `RequestError` if there is no room."""
        if self.open >= self.served.limits.requests:
            raise RequestError(f"{self.open} requests are being answered, the most that this server allows; try again later",
                               status=429, code="rate_limit_exceeded")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def sampled(self, request: Request, chat: bool) -> Response:
        """A whole answer, or a stream; a client that disconnects frees its rows, and every end frees its place."""
        self.check(request)
        body = await read_json(request, self.served.limits)
        with contextlib.ExitStack() as held:
            held.enter_context(self.place())
            asked, answer, rows = await within(self.served.limits.arrival, self.understood(body, chat))
            await within(self.served.limits.stalled, rows.start())
            held.callback(rows.release)
            if asked.stream:
                return _Events(self.streamed(asked, answer, rows), self.served.limits.unread, held.pop_all())
            nodes = await _unless_gone(request.receive, rows.whole())
            return JSONResponse(answer.whole(nodes, self.worker.tag))

    async def understood(self, body: Any, chat: bool) -> tuple[CompletionRequest, Answer, "_Rows"]:
        """What a body asks for, and the frame of its answer; costly texts are read in a thread."""
        served = self.served
        asked = await in_thread(read, body, chat, served.tokenizer, self.worker.vocab_size, self.worker.slot_tokens,
                                served.name, served.limits)
        answer = Answer(asked, served.tokenizer, served.name, self.worker.tags)
        return asked, answer, _Rows(self.worker, asked, served.limits.stalled)

    async def streamed(self, asked: CompletionRequest, answer: Answer, rows: "_Rows") -> AsyncIterator[str]:
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

    def check(self, request: Request) -> None:
        """Checks the bearer token, or the host where none is set."""
        admit(request, "Authorization", self.served.token, "Bearer TOKEN")


class _Events(StreamingResponse):
    """A stream of events; what is `held` is freed at its end, even if the client disconnected before it began.

    A piece that is not taken within `unread` seconds ends it: its client is not reading.
    """

    def __init__(self, events: AsyncIterator[str], unread: float, held: contextlib.ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._unread, self._held = unread, held

    async def __call__(self, scope, receive, send) -> None:
        async def soon(message):
            async with asyncio.timeout(self._unread):
                await send(message)

        with self._held, contextlib.suppress(ClientDisconnect, OSError):  # TimeoutError is one
            await _unless_gone(receive, self.stream_response(soon))


class _Rows:
    """The rows of one request, whose tokens come from the engine's thread into a queue of this event loop."""

    def __init__(self, worker: Worker, asked: CompletionRequest, stalled: float):
        self._worker, self._asked, self._stalled, self._loop = worker, asked, stalled, asyncio.get_running_loop()
        self._queue: asyncio.Queue[_ARRIVED] = asyncio.Queue()
        self._uids: list[int] = []

    async def start(self) -> None:
        """Queues the rows. Raises `RequestError` for rows that the engine refuses."""
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
            raise RequestError(str(error)) from None
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._worker.release(done.result()) if not done.exception() else None)
            raise

    async def next(self) -> tuple[int, Node]:
        """The next completion that has news, and its node. Raises `Failure`, also if the engine does nothing any more."""
        while True:
            try:
                async with asyncio.timeout(self._stalled):
                    index, event = await self._queue.get()
                break
            except TimeoutError:
                if (idle := time.monotonic() - self._worker.active) > self._stalled:
                    raise Failure(f"the engine has done nothing for {idle:.0f} seconds") from None
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
