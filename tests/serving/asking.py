"""Engines that sample from a server: our own on a loopback port, and a proxy that misbehaves on purpose."""
import contextlib
import inspect
import json
import pathlib

import chatter
import httpx
import jax
import numpy as np
from server import TOKENIZER, listening
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.models import Transformer
from jaxrl_llm.serving.worker import Worker
from jaxrl_llm.setup import start

MODEL = Transformer(start.model_config(chatter.get_config().model, TOKENIZER.vocab_size))
KEY, SLOTS, SLOT_TOKENS, PROMPT = jax.random.key(0), 4, 128, [257, *b"the prompt"]


def weights(seed):
    fresh = MODEL.init(jax.random.key(seed))
    return fresh | {"embed": fresh["embed"] * 4}  # far from uniform, and not of one token


def make_worker(seed=7, slot_tokens=SLOT_TOKENS):
    return Worker(SlotEngine(MODEL, weights(seed), KEY, slots=SLOTS, slot_tokens=slot_tokens, tokenizer=TOKENIZER, chunks=(4,)),
                  "another")


@contextlib.contextmanager
def asking(url, folder, reload="sglang", **options):
    """A server as a run uses it."""
    result = external.Server(external.Client(url, **options), MODEL.config, folder, reload=reload)
    try:
        yield result
    finally:
        result.close()


def make_engine(server, seed=0, **options):
    return external.ExternalEngine(server, weights(seed), KEY, slot_tokens=SLOT_TOKENS, **options)


def requests(uids, limit=24, **fields):
    return [Request(uid, limit, PROMPT, stop_tokens=TOKENIZER.stop_ids, **fields) for uid in uids]


def collected(engine):
    result = {}
    while nodes := engine.collect():
        result |= {node.uid: node for node in nodes}
    return result


def expected(uids, limit=24, seed=0, **fields):
    """The samples of an engine in this process with the seeds of the server."""
    engine = SlotEngine(MODEL, weights(seed), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    engine.submit(*requests(uids, limit, **fields))
    return collected(engine)


def assert_same_nodes(result, wanted):
    assert result.keys() == wanted.keys()
    for uid, node in wanted.items():
        np.testing.assert_array_equal(result[uid].tokens, node.tokens)
        np.testing.assert_allclose(result[uid].logprobs, node.logprobs, atol=1e-5)
        np.testing.assert_allclose(result[uid].entropies, node.entropies, atol=1e-5)
        assert (result[uid].finish, result[uid].start) == (node.finish, node.start)


@contextlib.contextmanager
def troubled(url, trouble):
    """A proxy before the server at `url`.

    `trouble(path, body)`, the path with its query, returns a Response that replaces the answer, a function that changes its
    JSON, or None for no change.
    """
    async def answer(request):
        content = await request.body()
        path = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        result = trouble(path, json.loads(content) if content else None)
        result = await result if inspect.isawaitable(result) else result
        if isinstance(result, Response):
            return result
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as session:
            inner = await session.request(request.method, url + request.url.path, content=content,
                                          headers={"Content-Type": "application/json"})
        made = inner.json()
        if result is not None:
            result(made)
        return Response(json.dumps(made), inner.status_code, media_type="application/json")

    with listening(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as at:
        yield at


def choice(change):
    """Changes the only choice of an answer."""
    return lambda answer: change(answer["choices"][0])


def error(status):
    return Response(json.dumps({"error": {"message": "not now"}}), status, media_type="application/json")


def untagged(path):
    """What takes the names of weights out of the answers of our server, as others do not name them."""
    def change(answer):
        for one in (answer, *answer.get("data", ()), *answer.get("choices", ())):
            for name in ("metadata", "weight_versions"):
                one.pop(name, None)
    return change if path in ("/v1/models", "/v1/completions") else None


def as_vllm(url, seen):
    """`trouble` of a proxy that makes our server at `url` take weights as vLLM does; requests for that are added to `seen`."""
    async def trouble(path, body):
        if path.startswith("/v1/"):
            return untagged(path)
        seen.append(path)
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            await hand_over(url, body["kwargs"]["weights_path"])
            return Response(json.dumps({"results": [None, None]}))
        cleared = path == "/reset_prefix_cache?reset_running_requests=true"
        return Response("") if cleared else Response(json.dumps({"detail": "Not Found"}), 404)
    return trouble


async def hand_over(url, path):
    """Makes our server read weights as a client of its own would."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as session:
        given = {"model_path": str(path), "weight_version": pathlib.Path(path).name}
        made = await session.post(url + "/update_weights_from_disk", json=given)
        assert made.json()["success"]
