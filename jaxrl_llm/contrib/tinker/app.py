"""The HTTP side of Tinker's API: routes, the API key, limits and futures. It never waits for the device."""
import asyncio
import contextlib
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pydantic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from jaxrl_llm.contrib.tinker import wire
from jaxrl_llm.contrib.tinker.futures import Futures
from jaxrl_llm.contrib.tinker.learner import Adam, LoraShape, checked
from jaxrl_llm.contrib.tinker.service import Service
from jaxrl_llm.serving.http import admit, handlers, in_thread, read, read_json, within
from jaxrl_llm.serving.requests import ClientLimits, RequestError
from jaxrl_llm.serving.worker import Failure

LIMITS = ClientLimits(completions=1024, requests=4096, body=64 << 20)
_PROTO = "application/x-protobuf"
_HOLD = 20.0  # seconds that a request for a future waits; clients wait 45
_M = TypeVar("_M", bound=pydantic.BaseModel)


class ServedTinker(NamedTuple):
    """The service and the settings of the server.

    Attributes:
      service: does the work.
      tokenizer_id: name or folder from which clients load a tokenizer.  stop_ids: tokens that end a completion by default.
      token: API key that clients must send; empty: any.
      limits: completions per request, unfinished requests, bytes of a body.
    """

    service: Service
    tokenizer_id: str | None
    stop_ids: tuple[int, ...]
    token: str = ""
    limits: ClientLimits = LIMITS
    hold: float = _HOLD


def make_app(served: ServedTinker) -> Starlette:
    """The application; it closes the worker when it ends."""
    server = _Server(served)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        await asyncio.to_thread(served.service.worker.close)

    posts = {"client/config": server.client_config, "client/dynamic_config": server.dynamic_config,
             "create_session": server.create_session, "session_heartbeat": server.heartbeat,
             "sessions/{session}/finish": server.finish, "telemetry": server.telemetry,
             "create_model": server.create_model, "get_info": server.get_info, "weights_info": server.weights_info,
             "forward_backward": server.forward_backward, "optim_step": server.optim_step,
             "save_weights": server.save_weights, "load_weights": server.load_weights,
             "save_weights_for_sampler": server.save_weights_for_sampler,
             "create_sampling_session": server.create_sampling_session, "asample": server.sample,
             "retrieve_future": server.retrieve_future}
    gets = {"healthz": server.health, "get_server_capabilities": server.capabilities, "samplers/{sampler}": server.sampler}
    routes = [*(Route(f"/api/v1/{name}", partial(server.answered, answer), methods=["POST"]) for name, answer in posts.items()),
              *(Route(f"/api/v1/{name}", partial(server.answered, answer)) for name, answer in gets.items())]
    see = "docs/guides/serving.md for what of Tinker's API this server answers"
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers(see))


class _Server:
    """The answers to requests."""

    def __init__(self, served: ServedTinker):
        self.served, self.service, self.futures = served, served.service, Futures()

    async def answered(self, answer: Callable[[Request], Any], request: Request) -> Response:
        """Answers a client with the right key and in time; a ValueError becomes the client's error."""
        if answer != self.health:
            admit(request, "X-API-Key", self.served.token)
        try:
            return await within(2 * self.served.limits.arrival, answer(request))
        except ValueError as error:
            raise RequestError(str(error)) from error

    # --- sessions -----------------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Needs no key."""
        alive = self.service.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has ended"}, 200 if alive else 503)

    async def client_config(self, request: Request) -> Response:
        """Asks clients to send the chunks of a pass one after the other, in their order."""
        return JSONResponse({"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False})

    async def dynamic_config(self, request: Request) -> Response:
        return JSONResponse({})

    async def telemetry(self, request: Request) -> Response:
        """Accepts telemetry and discards it."""
        return JSONResponse({"status": "accepted"})

    async def capabilities(self, request: Request) -> Response:
        model = {"model_name": self.service.name, "max_context_length": self.service.learner.longest, "trainable": True,
                 "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def create_session(self, request: Request) -> Response:
        await self.body(request, types.CreateSessionRequest)
        return JSONResponse({"type": "create_session", "session_id": self.service.begin()})

    async def heartbeat(self, request: Request) -> Response:
        asked = await self.body(request, types.SessionHeartbeatRequest)
        if not self.service.alive(asked.session_id):
            raise RequestError(f"this server has no session {asked.session_id!r}; make a new ServiceClient", status=410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        await asyncio.wrap_future(self.service.finish(request.path_params["session"]))
        return JSONResponse({})

    # --- training -----------------------------------------------------------------------------------------------------------

    async def create_model(self, request: Request) -> Response:
        asked = await self.body(request, types.CreateModelRequest)
        if asked.optimizer_config.type != "adamw":
            raise RequestError(f"optimizer_config={asked.optimizer_config.type!r}; this server has 'adamw'")
        if asked.lora_config is None:
            raise RequestError("no lora_config; this server trains LoRA adapters alone")
        model, lora = f"{asked.session_id}:train:{asked.model_seq_id}", asked.lora_config
        shape = LoraShape(lora.rank, lora.train_attn, lora.train_mlp)
        def start():
            return self.service.create(asked.session_id, model, asked.base_model, shape, lora.seed)

        return self.later(f"{model}:0", start, lambda _: JSONResponse({"type": "create_model", "model_id": model}))

    async def get_info(self, request: Request) -> Response:
        asked = await self.body(request, types.GetInfoRequest)
        rank = self.service.model(asked.model_id).adapter.shape.rank
        name = self.service.name
        data = {"model_name": name, "tokenizer_id": self.served.tokenizer_id}
        return JSONResponse({"type": "get_info", "model_id": asked.model_id, "model_name": name, "model_data": data,
                             "is_lora": True, "lora_rank": rank})

    async def forward_backward(self, request: Request) -> Response:
        asked = await in_thread(wire.read_pass, await read(request, _PROTO, self.served.limits))
        return self.later(f"{asked.model}:{asked.number}", lambda: self.service.run(
            asked.model, asked.data, asked.loss, asked.settings, asked.backward),
            lambda outcome: _proto(wire.write_pass(outcome)))

    async def optim_step(self, request: Request) -> Response:
        asked = await self.body(request, types.OptimStepRequest)
        params = asked.optim_params
        if not isinstance(params, types.AdamParams):
            raise RequestError(f"optimizer_params of the type {params.type!r}; this server takes adam_params")
        adam = Adam(params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm)
        checked(adam)
        return self.later(f"{asked.model_id}:{asked.seq_id}", lambda: self.service.step(asked.model_id, adam),
                          lambda norm: JSONResponse({"metrics": {"grad_norm": norm}}))

    async def save_weights(self, request: Request) -> Response:
        asked = await self.body(request, types.SaveWeightsRequest)
        name = asked.path or f"{asked.seq_id:06d}"
        return self.later(f"{asked.model_id}:{asked.seq_id}", lambda: self.service.save(asked.model_id, name, asked.overwrite),
                          lambda path: JSONResponse({"type": "save_weights", "path": path}))

    async def load_weights(self, request: Request) -> Response:
        asked = await self.body(request, types.LoadWeightsRequest)
        if asked.base_model not in (None, self.service.name):
            raise RequestError(f"base_model={asked.base_model!r}; this server has {self.service.name!r}")
        model, number = asked.model_id, asked.seq_id
        if asked.session_id is not None:
            model, number = f"{asked.session_id}:train:{asked.model_seq_id}", 0
        if model is None:
            raise RequestError("neither model_id nor session_id; give one of them")
        return self.later(f"{model}:{number}", lambda: self.service.load(model, asked.path, asked.optimizer, asked.session_id),
                          lambda _: JSONResponse({"type": "load_weights", "path": asked.path, "model_id": model}))

    async def weights_info(self, request: Request) -> Response:
        body = await read_json(request, self.served.limits)
        if not isinstance(body, dict) or not isinstance(body.get("tinker_path"), str):
            raise RequestError("give {'tinker_path': 'tinker://MODEL/KIND/NAME'}")
        saved = await in_thread(self.service.stored, body["tinker_path"])
        return JSONResponse({"base_model": saved.base, "is_lora": True, "lora_rank": saved.shape.rank, "train_unembed": False,
                             "train_mlp": saved.shape.mlp, "train_attn": saved.shape.attention})

    # --- sampling -----------------------------------------------------------------------------------------------------------

    async def save_weights_for_sampler(self, request: Request) -> Response:
        asked = await self.body(request, types.SaveWeightsForSamplerRequest)
        if asked.path is None and asked.sampling_session_seq_id is None:
            raise RequestError("neither path nor sampling_session_seq_id; give one of them")
        session = asked.model_id.partition(":")[0]
        sampler = None if asked.path is not None else f"{session}:sample:{asked.sampling_session_seq_id}"
        key = "path" if sampler is None else "sampling_session_id"
        return self.later(f"{asked.model_id}:{asked.seq_id}", lambda: self.service.save_to_sample(
            asked.model_id, asked.path, sampler, asked.kind == "inflight"),
            lambda saved: JSONResponse({"type": "save_weights_for_sampler", key: saved}))

    async def create_sampling_session(self, request: Request) -> Response:
        asked = await self.body(request, types.CreateSamplingSessionRequest)
        if not self.service.alive(asked.session_id):
            raise RequestError(f"this server has no session {asked.session_id!r}; make a new ServiceClient")
        sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await in_thread(self.service.open_sampler, sampler, asked.base_model, asked.model_path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def sampler(self, request: Request) -> Response:
        name = request.path_params["sampler"]
        return JSONResponse({"sampler_id": name, "base_model": self.service.name, "model_path": self.service.address_of(name)})

    async def sample(self, request: Request) -> Response:
        asked = await self.body(request, types.SampleRequest)
        if asked.sampling_session_id is None or asked.seq_id is None:
            raise RequestError("no sampling_session_id and seq_id; create a sampling session first")
        if self.futures.open >= self.served.limits.requests:
            raise RequestError(f"{self.futures.open} requests are not done, the most that this server allows; try again later",
                               status=429, code="rate_limit_exceeded")
        snapshot = self.service.snapshot_of(asked.sampling_session_id)
        rows = wire.requests_of(asked, self.served.stop_ids, self.service.worker.slot_tokens, self.served.limits.completions)
        tokens = list(rows[0].tokens)

        def start():
            logprobs = self.service.score(snapshot, tokens, asked.prompt_logprobs_last_n) if asked.prompt_logprobs else None
            return _with(self.service.sample(snapshot, rows), logprobs)

        name = f"{asked.sampling_session_id}:{asked.seq_id}"
        return self.later(name, start, lambda samples: _proto(wire.write_samples(*samples)),
                          sample_sequence_ids=[f"{name}:{i}" for i in range(len(rows))])

    # --- futures ------------------------------------------------------------------------------------------------------------

    def later(self, request_id: str, start: Callable[[], Future], answer: Callable[[Any], Response], **fields) -> Response:
        """The id of a future; a request repeated under its id is not started again."""
        if request_id not in self.futures:
            self.futures.add(request_id, start(), answer)
        return JSONResponse({"request_id": request_id, **fields})

    async def retrieve_future(self, request: Request) -> Response:
        """The result of a request; if it is not done within a while, the answer tells the client to ask again."""
        asked = await self.body(request, types.FutureRetrieveRequest)
        try:
            pending = self.futures.get(asked.request_id)
        except KeyError:
            raise RequestError(f"this server has no request {asked.request_id!r}: its result was dropped, or the server was "
                               "started again", status=410) from None
        future, loop, done = pending.future, asyncio.get_running_loop(), asyncio.Event()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), self.served.hold)
        if not future.done():
            return JSONResponse({"type": "try_again", "request_id": asked.request_id, "queue_state": "active"})
        self.futures.was_read(asked.request_id)
        error = future.exception()
        if error is None:
            return await in_thread(pending.answer, future.result())
        if isinstance(error, ValueError):
            return JSONResponse({"error": str(error), "category": "user"})
        if not isinstance(error, Failure):
            traceback.print_exception(error, file=sys.stderr)
        return JSONResponse({"error": f"{type(error).__name__}: {str(error)[:300]}", "category": "server"})

    async def body(self, request: Request, kind: type[_M]) -> _M:
        """The JSON of the body as one of the client's own types. Raises `RequestError` if it does not fit."""
        body = await read_json(request, self.served.limits)
        try:
            return kind.model_validate(body)
        except pydantic.ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:4])
            raise RequestError(f"the body is no {kind.__name__}: {wrong}") from None


def _with(samples: Future, logprobs: Future | None) -> Future:
    """One future with the results of both."""
    both: Future = Future()

    def done(_):
        parts = [samples] if logprobs is None else [logprobs, samples]
        if both.done() or not all(one.done() for one in parts):
            return
        errors = [error for one in parts if (error := one.exception()) is not None]
        with contextlib.suppress(Exception):  # the other one was quicker
            if errors:
                both.set_exception(errors[0])
            else:
                both.set_result((samples.result(), None if logprobs is None else logprobs.result()))

    for one in (samples, *([] if logprobs is None else [logprobs])):
        one.add_done_callback(done)
    return both


def _proto(body: bytes) -> Response:
    return Response(body, media_type=_PROTO)
