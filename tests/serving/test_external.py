"""Sampling from a server, our own on a loopback port: the contract of the engine."""
import asyncio
import dataclasses
import sys
import threading
import time

import jax
import numpy as np
import pytest
from asking import (
    KEY,
    MODEL,
    PROMPT,
    SLOT_TOKENS,
    SLOTS,
    asking,
    assert_same_nodes,
    collected,
    make_engine,
    requests,
    troubled,
    weights,
)
from server import TOKENIZER

from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.engine import Request, SlotEngine
from jaxrl_llm.engines.server.engine import hashed
from jaxrl_llm.engines.server.server import digest

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.mark.slow
def test_trajectories_are_those_of_the_weights_that_were_published(server, worker, folder):
    engine = make_engine(server, version=3)
    assert worker.tag == server.tag == digest(jax.device_get(weights(0))) and (folder / server.tag).is_dir()
    tokens = np.array([5, 9, 12])
    distribution = Sampling(0.7, top_k=200, top_p=0.99, min_p=1e-4)
    engine.submit(*(request for uid in tokens for request in requests([int(uid)], seed=int(uid), sampling=distribution)))
    result = collected(engine)
    local = SlotEngine(MODEL, weights(0), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    seed = {int(uid): hashed(int(uid).to_bytes(8, "big") + bytes(8)) for uid in tokens}
    local.submit(*(request for uid in seed for request in requests([uid], seed=seed[uid], sampling=distribution)))
    assert_same_nodes(result, collected(local))
    assert all((node.policy_version == 3).all() and node.parent is None for node in result.values())


@pytest.mark.slow
def test_draws_follow_from_the_key_the_uid_and_earlier_draws(server):
    def nodes(key, *uids):
        engine = external.ExternalEngine(server, weights(0), key, slot_tokens=SLOT_TOKENS)
        engine.submit(*requests(uids))
        return {uid: node.tokens.tolist() for uid, node in collected(engine).items()}

    alone, together = nodes(KEY, 4), nodes(KEY, 3, 4, 2**40)
    assert alone[4] == together[4] and len({tuple(one) for one in together.values()}) == 3
    assert nodes(jax.random.key(1), 4) != alone


def test_a_trajectory_continues_with_the_exact_tokens(url, folder):
    """The prompt of a turn has the exact tokens of samples and messages before it; no text is encoded again."""
    bodies = []

    def record(path, body):
        if path == "/v1/completions":
            bodies.append(body)

    with troubled(url, record) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0], limit=6, keep=True))
        first = engine.collect()[0]
        others = [200, 13, 255, 13]  # no text has these bytes
        engine.extend(0, others, limit=10)
        second = engine.collect()[0]
        assert engine.collect() == []
        assert [body["prompt"] for body in bodies] == [PROMPT, [*PROMPT, *first.tokens.tolist(), *others]]
        assert bodies[1]["max_tokens"] == 10 - len(first.tokens) and bodies[0]["seed"] != bodies[1]["seed"]
        assert second.start == len(PROMPT) + len(first.tokens) + 4 and len(second.tokens) <= 10 - len(first.tokens)
        engine.release(0)
        with pytest.raises(KeyError, match="not held"):
            engine.extend(0, others)


def test_stop_texts_end_trajectories(server, healthy):
    text = TOKENIZER.decode(healthy[0].tokens)
    engine = make_engine(server)
    engine.submit(*requests([0], stop_texts=(text[3:5],)))
    node = engine.collect()[0]
    assert node.finish == "stop_string" and node.tokens.tolist() == healthy[0].tokens[:len(node.tokens)].tolist()
    assert text[3:5] in TOKENIZER.decode(node.tokens)


def test_what_a_server_cannot_do_is_refused(server):
    engine = make_engine(server)
    engine.submit(*requests([0], keep=True))
    for bad, reason in ((requests([0]), "submitted before"), (requests([1, 1]), "submitted before"),
                        (requests([2], parent=0), "fork"), (requests([2], stop_sequences=((1, 2),)), "stop sequences"),
                        (requests([2], limit=0), "a limit of 0"), ([Request(2, 4)], "has 0 tokens"),
                        (requests([2], sampling=Sampling(-1.0)), "temperature"), (requests([2], limit=2.5), "whole number"),
                        (requests([2], sampling=Sampling(max_tokens=3)), "max_tokens=3 below its limit of 24"),
                        (requests([2], sampling=Sampling(spread=0.5)), "spread=0.5")):
        with pytest.raises(ValueError, match=reason):
            engine.submit(*requests([3]), *bad)  # and none of them is asked for
    with pytest.raises(ValueError, match="runs; wait"):
        engine.extend(0, [1])
    node = engine.collect()[0]
    with pytest.raises(ValueError, match="a limit of 1, "):
        engine.extend(0, [1], limit=1)
    assert node.uid == 0 and engine.collect() == []


def test_a_server_goes_on_behind_what_a_completion_begins_with(server):
    engine, (plain,) = make_engine(server, version=3), requests([0])
    begun = dataclasses.replace(plain, tokens=(*plain.tokens, 9, 8), drawn=2)
    engine.submit(begun)
    (node,) = collected(engine).values()
    assert node.start == len(plain.tokens) + 2 and 0 < len(node.tokens) <= plain.limit - 2 and {*node.policy_version} == {3}


def test_released_trajectories_are_not_awaited(server, worker):
    engine, event = make_engine(server), threading.Event()
    worker.call(lambda _: event.wait(60))
    engine.submit(*requests([0, 1]))
    engine.release(0)
    event.set()
    assert collected(engine).keys() == {1}


def test_weights_that_change_amid_a_trajectory_are_named_token_by_token(server, worker):
    engine, started, event = make_engine(server, version=1), threading.Event(), threading.Event()

    def hold(slots):
        if slots.running:
            started.set()
            event.wait(60)

    engine.submit(*requests([0], limit=48))
    while not started.is_set():
        worker.call(hold)
        time.sleep(0.001)
    waiting, end = worker._inbox.qsize(), time.monotonic() + 60

    def let_go():
        while worker._inbox.qsize() == waiting and time.monotonic() < end:  # until the new weights wait for the next chunk
            time.sleep(0.01)
        event.set()

    threading.Thread(target=let_go).start()
    engine.publish(2, weights(1))
    versions = engine.collect()[0].policy_version.tolist()
    assert versions == sorted(versions) and set(versions) == {1, 2}
    engine.submit(*requests([1]))
    assert set(engine.collect()[0].policy_version.tolist()) == {2}


def test_weights_are_published_once_and_old_files_removed(url, folder, worker):
    posted = []

    def record(path, body):
        posted.extend([body["weight_version"]] if path == "/update_weights_from_disk" else [])

    with troubled(url, record) as at, asking(at, folder) as server:
        params = [weights(seed) for seed in (11, 12, 13)]
        tags = [server.publish(params[i]) for i in (0, 0, 1, 0, 2, 2)]
        copied = server.publish(jax.tree.map(lambda x: x + 0, params[2]))
        assert copied == tags[-1] and posted == [tags[0], tags[2], tags[0], tags[4]] and worker.tag == tags[-1]
        assert {tag for tag in tags if (folder / tag).is_dir()} == {tags[0], tags[4]}
        assert not list(folder.glob("*.part"))


def test_a_server_is_asked_for_few_things_at_a_time(url, folder):
    now, most = [0], [0]

    async def slow(path, body):
        now[0] += 1
        most[0], end = max(most[0], now[0]), time.monotonic() + 60
        while path == "/v1/completions" and most[0] < 3 and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # in which a fourth would come
        now[0] -= 1

    with troubled(url, slow) as at, asking(at, folder, requests=3) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(9), limit=2))
        assert len(collected(engine)) == 9 and most[0] == 3


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_llm\[external\]'"):
        external.Client("http://127.0.0.1:1")


def test_servers_are_named_with_or_without_their_version():
    for given in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        client = external.Client(given)
        assert client.url == "http://a:1"
        client.close()
