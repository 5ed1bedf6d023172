"""Random bodies to the server, in this process: each gets an answer or an error of OpenAI's format, and frees its place.

150 bodies to each server run with the suite; `JAXRL_LLM_FUZZ=100 python -m pytest tests/hostile/test_fuzz_server.py` tries
a hundred times as many, see `fuzz.py`.
"""
import asyncio
import importlib.util
import json
import random

import pytest
from fuzz import SEED, TIMES
from in_process import ask
from server import MODEL, TOKENIZER, make_worker

from jaxrl_llm.serving.app import ServedModel, make_app
from jaxrl_llm.serving.requests import _NEUTRAL, _OWN, _SAMPLED, ClientLimits

COUNT = 150 * TIMES
TEXTS = ["", "a", "assistant", "user", "tool", "system", "<|eos|>", "{", "{{ x }}", "\ud800", "\x00", "\u2028", "a" * 300,
         "".join(map(chr, range(0xE100, 0xE200))), "auto", "none", "tiny", "length", "1e999", "~nosuchuser/x", "../x",
         "\U000e0041"]
NUMBERS = [0, 1, -1, 2, 5, 64, 65, 127, 128, 258, 259, 2**31, 2**63 - 1, -2**63, 2**63, 10**400, 0.0, -0.0, 0.5, 1.0, 1e-320,
           1.7e308, float("nan"), float("inf"), -float("inf"), True, False, None]

PARTS = ["seed", "stop", "temperature", "top_p", "top_k", "beta2", "eps", "learning_rate", "weight_decay", "train_mlp"]


def value(rng, depth=3):
    """Any JSON value, with NaN and halves of surrogate pairs."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 2:
        return rng.choice(TEXTS)
    if kind < 5:
        return rng.choice(NUMBERS)
    if kind == 5:
        return {rng.choice(TEXTS): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return [value(rng, depth - 1) for _ in range(rng.randrange(4))]


def message(rng):
    """A message that is often right in part."""
    made = {"role": rng.choice(TEXTS[2:6]), "content": rng.choice(TEXTS)}
    if rng.random() < 0.3:
        made["tool_calls"] = [{"type": "function", "function": {"name": rng.choice(TEXTS), "arguments": value(rng)}}]
    if rng.random() < 0.3:
        made[rng.choice(["role", "content", "name", "tool_calls", "x"])] = value(rng)
    return made


def body_of(rng, chat):
    """A request that is right but for some of its fields."""
    body = {"max_tokens": rng.randrange(1, 4)}
    if chat:
        body["messages"] = [message(rng) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.3:
            body["tools"] = [{"type": "function", "function": {"name": rng.choice(TEXTS), "parameters": value(rng)}}]
    else:
        body["prompt"] = rng.choice([rng.choice(TEXTS), [rng.choice(TEXTS)], [1, 2, 258], [[3], [4, 5]]])
    for name in rng.sample([*_SAMPLED, *_NEUTRAL, *_OWN[chat]], rng.randrange(3)):
        body[name] = value(rng)
    if rng.random() < 0.1:
        body[rng.choice(TEXTS)] = value(rng)
    return body if rng.random() < 0.95 else value(rng)


def written(rng, body):
    """The body as bytes, sometimes broken, or nested too deeply."""
    content = bytearray(json.dumps(body).encode())
    chance = rng.random()
    if chance < 0.1:
        content[rng.randrange(len(content))] = rng.randrange(256)
    elif chance < 0.15:
        content = content[:rng.randrange(len(content))]
    elif chance < 0.2:
        content = b'{"messages": ' + b"[" * (deep := rng.choice([90, 900, 980, 2000])) + b"]" * deep + b"}"
    return bytes(content)


def check(answer, sent):
    """An answer, or an error that says so; never a failure of the server."""
    assert answer.status in (200, 400, 403, 404, 413, 415), (answer, sent)
    if answer.status != 200:
        error = answer.json["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}, (answer, sent)
        assert len(answer.body) < 4000, (answer, sent)


def test_random_bodies_are_answered_and_keep_no_place():
    """One place: a request that kept it would have all later ones refused with 429."""
    rng, worker = random.Random(SEED), make_worker()

    async def all_of_them():
        app = make_app(ServedModel("tiny", MODEL.config, TOKENIZER, worker, limits=ClientLimits(completions=4, requests=1)))
        served = 0
        for _ in range(COUNT):
            path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/chat/completions", "/update_weights_from_disk"])
            sent = written(rng, body_of(rng, "chat" in path))
            answer = await ask(app, path, sent)
            check(answer, (path, sent))
            served += answer.status == 200
        return served

    served = asyncio.run(all_of_them())
    worker.close()
    assert served > COUNT / 10  # so that not all stop at the first check


@pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="needs Tinker's client: pip install 'jaxrl_llm[tinker]'")
def test_random_bodies_to_tinkers_server_are_answered(tmp_path):
    from tinker_server import make_service

    from jaxrl_llm.contrib.tinker.app import ServedTinker
    from jaxrl_llm.contrib.tinker.app import make_app as make_tinker
    from jaxrl_llm.contrib.tinker.learner import LoraShape
    rng, service = random.Random(SEED), make_service(tmp_path)
    session = service.begin()
    model = f"{session}:train:0"
    service.create(session, model, "tiny", LoraShape(2), 0).result(60)
    service.open_sampler(f"{session}:sample:0", "tiny", None)
    saved = service.save(model, "saved", False).result(60)
    right = {"session_id": session, "model_id": model, "base_model": "tiny", "path": saved, "tinker_path": saved, "seq_id": 1,
             "model_path": saved, "sampling_session_id": f"{session}:sample:0", "num_samples": 1, "optimizer": True,
             "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2},
             "lora_config": {"rank": 2}, "request_id": f"{model}:1", "adam_params": {"beta1": 0.9}, "name": "a"}
    routes = {"create_session": ["tags", "sdk_version"], "session_heartbeat": ["session_id"], "get_info": ["model_id"],
              "create_model": ["session_id", "model_seq_id", "base_model", "lora_config"],
              "optim_step": ["model_id", "seq_id", "adam_params"], "save_weights": ["model_id", "name", "seq_id"],
              "load_weights": ["model_id", "path", "seq_id", "optimizer"], "weights_info": ["tinker_path"],
              "create_sampling_session": ["session_id", "sampling_session_seq_id", "base_model", "model_path"],
              "asample": ["sampling_session_id", "seq_id", "num_samples", "prompt", "sampling_params"],
              "save_weights_for_sampler": ["model_id", "name"], "retrieve_future": ["request_id"], "forward_backward": []}

    def of(rng, name):
        """The right value, or a wrong one, or a right one with a wrong part."""
        whole = right.get(name, rng.randrange(9))
        if rng.random() < 0.6:
            return whole
        if isinstance(whole, dict) and rng.random() < 0.7:
            return whole | {rng.choice([*whole, *PARTS]): value(rng)}
        return value(rng)

    async def all_of_them():
        app = make_tinker(ServedTinker(service, None, tuple(TOKENIZER.stop_ids), hold=0.01))
        for _ in range(COUNT):
            route = rng.choice([*routes])
            sent = written(rng, {name: of(rng, name) for name in routes[route] if rng.random() < 0.95})
            kind = "application/x-protobuf" if route == "forward_backward" else "application/json"
            answer = await ask(app, f"/api/v1/{route}", sent, headers={"content-type": kind})
            assert answer.status in (200, 400, 410, 415), (route, sent, answer)
            assert b'"category":"server"' not in answer.body, (route, sent, answer)

    asyncio.run(all_of_them())
    assert service.worker.alive
    service.worker.close()
