"""Sampling from a server: runs against our own on a loopback port, and against one that misbehaves on purpose."""
import asyncio
import contextlib
import inspect
import json
import socket
import sys
import threading
import time

import chatter
import httpx
import jax
import numpy as np
import pytest
import run_files
from server import TOKENIZER, listening, serving
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from jaxrl_llm.generation import Sampling, external
from jaxrl_llm.generation.engine import Engine, Request
from jaxrl_llm.generation.external import client as clients
from jaxrl_llm.generation.external.engine import hashed
from jaxrl_llm.generation.external.server import digest
from jaxrl_llm.models import Transformer
from jaxrl_llm.models.lora import merge
from jaxrl_llm.serving.worker import Worker
from jaxrl_llm.training import loop, pages, schedules, setup, start
from jaxrl_llm.training.trained import trained

MODEL = Transformer(start.model_config(chatter.get_config().model, TOKENIZER.vocab_size))
KEY, SLOTS, SLOT_TOKENS, PROMPT = jax.random.key(0), 4, 128, [257, *b"the prompt"]


def weights(seed):
    fresh = MODEL.init(jax.random.key(seed))
    return fresh | {"embed": fresh["embed"] * 4}  # far from uniform, and not of one token


def make_worker(seed=7, slot_tokens=SLOT_TOKENS):
    return Worker(Engine(MODEL, weights(seed), KEY, slots=SLOTS, slot_tokens=slot_tokens, tokenizer=TOKENIZER, chunks=(4,)),
                  "another")


@pytest.fixture(scope="module")
def worker():
    return make_worker()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def url(worker, folder):
    with serving(worker, config=MODEL.config, weights_from=folder) as at:
        yield at


@contextlib.contextmanager
def asking(url, folder, **options):
    """A server as a run knows it."""
    found = external.Server(external.Client(url, **options), MODEL.config, folder)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def server(url, folder):
    with asking(url, folder, deadline=60) as found:
        yield found


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(clients, "_FIRST", 0.01)


def make_engine(server, seed=0, **options):
    return external.ExternalEngine(server, weights(seed), KEY, slot_tokens=SLOT_TOKENS, **options)


def requests(uids, limit=24, **fields):
    return [Request(uid, limit, PROMPT, stop_tokens=TOKENIZER.stop_ids, **fields) for uid in uids]


def collected(engine):
    found = {}
    while nodes := engine.collect():
        found |= {node.uid: node for node in nodes}
    return found


def expected(uids, limit=24, seed=0, **fields):
    """What an engine of this process samples with the seeds that the server is given."""
    engine = Engine(MODEL, weights(seed), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    engine.submit(*requests(uids, limit, **fields))
    return collected(engine)


def assert_same_nodes(found, wanted):
    assert found.keys() == wanted.keys()
    for uid, node in wanted.items():
        np.testing.assert_array_equal(found[uid].tokens, node.tokens)
        np.testing.assert_allclose(found[uid].logprobs, node.logprobs, atol=1e-5)
        np.testing.assert_allclose(found[uid].entropies, node.entropies, atol=1e-5)
        assert (found[uid].finish, found[uid].start) == (node.finish, node.start)


@pytest.fixture(scope="module")
def healthy(url, folder):
    """12 trajectories of a server that nothing happens to."""
    with asking(url, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(12)))
        return collected(engine)


# --- the contract -----------------------------------------------------------------------------------------------------------


def test_trajectories_are_those_of_the_weights_that_were_published(server, worker, folder):
    engine = make_engine(server, version=3)
    assert worker.tag == server.tag == digest(jax.device_get(weights(0))) and (folder / server.tag).is_dir()
    tokens = np.array([5, 9, 12])
    distribution = Sampling(0.7, top_k=200, top_p=0.99, min_p=1e-4)
    engine.submit(*(request for uid in tokens for request in requests([int(uid)], seed=int(uid), sampling=distribution)))
    found = collected(engine)
    local = Engine(MODEL, weights(0), KEY, slots=SLOTS, slot_tokens=SLOT_TOKENS, tokenizer=TOKENIZER, chunks=(4,))
    seed = {int(uid): hashed(int(uid).to_bytes(8, "big") + bytes(8)) for uid in tokens}
    local.submit(*(request for uid in seed for request in requests([uid], seed=seed[uid], sampling=distribution)))
    assert_same_nodes(found, collected(local))
    assert all((node.policy_version == 3).all() and node.parent is None for node in found.values())


def test_draws_follow_from_the_key_the_uid_and_what_was_drawn(server):
    def nodes(key, *uids):
        engine = external.ExternalEngine(server, weights(0), key, slot_tokens=SLOT_TOKENS)
        engine.submit(*requests(uids))
        return {uid: node.tokens.tolist() for uid, node in collected(engine).items()}

    alone, together = nodes(KEY, 4), nodes(KEY, 3, 4, 2**40)
    assert alone[4] == together[4] and len({tuple(one) for one in together.values()}) == 3
    assert nodes(jax.random.key(1), 4) != alone


def test_a_trajectory_goes_on_with_the_very_tokens(url, folder):
    """The prompt of a turn is what was sampled and what others said, token by token; nothing is spelled in between."""
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
                        (requests([2], sampling=Sampling(-1.0)), "temperature")):
        with pytest.raises(ValueError, match=reason):
            engine.submit(*requests([3]), *bad)  # and none of them is asked for
    with pytest.raises(ValueError, match="runs; wait"):
        engine.extend(0, [1])
    node = engine.collect()[0]
    with pytest.raises(ValueError, match="a limit of 1, "):
        engine.extend(0, [1], limit=1)
    assert node.uid == 0 and engine.collect() == []


def test_what_is_released_is_not_waited_for(server, worker):
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
    threading.Timer(0.5, event.set).start()
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
        most[0] = max(most[0], now[0])
        await asyncio.sleep(0.02)
        now[0] -= 1

    with troubled(url, slow) as at, asking(at, folder, requests=3) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(9), limit=2))
        assert len(collected(engine)) == 9 and most[0] == 3


# --- faults -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def troubled(url, trouble):
    """A server before the one at `url`.

    `trouble(path, body)` says what becomes of a request: a Response in the place of the answer, or a function that changes the
    JSON of it; None: nothing.
    """
    async def answer(request):
        content = await request.body()
        found = trouble(request.url.path, json.loads(content) if content else None)
        found = await found if inspect.isawaitable(found) else found
        if isinstance(found, Response):
            return found
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as session:
            inner = await session.request(request.method, url + request.url.path, content=content,
                                          headers={"Content-Type": "application/json"})
        made = inner.json()
        if found is not None:
            found(made)
        return Response(json.dumps(made), inner.status_code, media_type="application/json")

    with listening(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as at:
        yield at


def choice(change):
    """What changes the only choice of an answer."""
    return lambda answer: change(answer["choices"][0])


def error(status):
    return Response(json.dumps({"error": {"message": "not now"}}), status, media_type="application/json")


GARBAGE = {
    "not JSON": (Response("<html>"), "without one entry in 'choices': '<html>'"),
    "a list": (Response("[]"), "without one entry in 'choices'"),
    "no choices": (lambda answer: answer.pop("choices"), "without one entry in 'choices'"),
    "two choices": (lambda answer: answer["choices"].append({}), "without one entry in 'choices'"),
    "no log-probs": (choice(lambda one: one.update(logprobs=None)), "token_logprobs are not"),
    "fewer log-probs": (choice(lambda one: one["logprobs"]["token_logprobs"].pop()), "token_logprobs are not"),
    "a log-prob of null": (choice(lambda one: one["logprobs"]["token_logprobs"].__setitem__(0, None)), "null"),
    "a log-prob of NaN": (choice(lambda one: one["logprobs"]["token_logprobs"].__setitem__(0, float("nan"))), "NaN"),
    "fewer entropies": (choice(lambda one: one["entropies"].pop()), "entropies are not"),
    "fewer versions": (choice(lambda one: one["weight_versions"].pop()), "weight_versions are not"),
    "no token": (choice(lambda one: one.update(token_ids=[])), "0 token_ids"),
    "too many tokens": (choice(lambda one: one.update(token_ids=[1] * 25)), "25 token_ids; there are to be 1 to 24"),
    "an unknown token": (choice(lambda one: one["token_ids"].__setitem__(0, 259)), "each from 0 to 258"),
    "a token that is a text": (choice(lambda one: one["token_ids"].__setitem__(0, "1")), "each from 0 to 258"),
    "a stop at no stop token": (choice(lambda one: one.update(token_ids=[1] * 24, finish_reason="stop")), "behind the token 1"),
    "an end before the limit": (choice(lambda one: one.update(token_ids=[1] * 23, finish_reason="length")), "after 23 of 24"),
    "an abort": (choice(lambda one: one.update(finish_reason="abort")), "finish_reason is 'abort'"),
}
BUSY = {status: (error(status), f"status {status}: not now") for status in (429, 500, 502, 503)}


def first_times(troubles):
    """Trouble for the first requests for completions, one each; the seeds of those requests."""
    left, seeds = list(troubles), []

    def trouble(path, body):
        if path == "/v1/completions" and left:
            seeds.append(body["seed"])
            return left.pop()
        return None
    return trouble, seeds


def test_what_fails_is_asked_for_again_and_nothing_is_lost(url, folder, healthy):
    troubles = [found for found, _ in [*GARBAGE.values(), *BUSY.values()]]
    trouble, seeds = first_times(troubles)
    with troubled(url, trouble) as at, asking(at, folder, deadline=60) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)
    assert len(seeds) == len(troubles)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_server_that_never_makes_sense_ends_the_run(url, folder, kind):
    trouble, reason = GARBAGE[kind]
    with troubled(url, lambda path, body: trouble if path == "/v1/completions" else None) as at, \
            asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Fault, match="the last of 5 attempts") as found:
            engine.collect()
        assert reason in str(found.value) and at in str(found.value) and "trajectory 0, 11 tokens" in found.value.__notes__[0]


@pytest.mark.parametrize("status", BUSY)
def test_a_server_that_stays_busy_is_asked_until_the_deadline(url, folder, status, capsys):
    with troubled(url, lambda path, body: error(status) if path == "/v1/completions" else None) as at, \
            asking(at, folder) as server:
        engine, server._client.deadline = make_engine(server), 0.5
        began = time.monotonic()
        engine.submit(*requests([0]))
        with pytest.raises(external.Fault, match=f"status {status}: not now.*; that was the last of .* attempts in"):
            engine.collect()
        assert time.monotonic() - began < 10
        assert f"{at}: status {status}: not now; asking again for up to" in capsys.readouterr().err


def test_others_go_on_where_one_fails(url, folder, healthy):
    broken = []

    def trouble(path, body):
        if path == "/v1/completions" and (not broken or body["seed"] in broken):
            broken[:] = [body["seed"]]
            return error(400)
        return None

    with troubled(url, trouble) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(4)))
        found, failed = {}, []
        while True:
            try:
                nodes = engine.collect()
            except external.Refusal as refusal:
                failed.append(str(refusal))
                continue
            if not nodes:
                break
            found |= {node.uid: node for node in nodes}
        assert len(found) == 3 and len(failed) == 1 and "status 400: not now" in failed[0]
        assert_same_nodes(found, {uid: healthy[uid] for uid in found})


def test_no_answer_in_time(folder):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with asking(at, folder, deadline=0.3) as server, pytest.raises(
                external.Fault, match=f"GET {at}/v1/models: no answer; that was the last of 1 attempts in"):
            server.publish(weights(0))
    with asking(at, folder, deadline=0.3) as server, pytest.raises(external.Fault, match="ConnectError"):
        server.publish(weights(0))


@pytest.mark.parametrize(("change", "reason"), (
    (choice(lambda one: one.pop("token_ids")), "answers without token_ids .it has entropies, finish_reason"),
    (choice(lambda one: one.update(prompt_token_ids=[1])), "other tokens in the place of the prompt"),
    (error(401), "status 401: not now")))
def test_what_no_further_attempt_mends_ends_the_run_at_once(url, folder, change, reason):
    count = []
    with troubled(url, lambda path, body: (count.append(1), change)[1] if path == "/v1/completions" else None) as at, \
            asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Refusal, match=reason):
            engine.collect()
        assert len(count) == 1


def test_a_server_that_dies_amid_a_batch_gets_its_weights_again(folder, healthy):
    """It comes back at the same port, with other weights than the run has; what was on its way is sampled again."""
    socket_, found = socket.create_server(("127.0.0.1", 0)), {}
    port = socket_.getsockname()[1]
    socket_.close()
    with contextlib.ExitStack() as stack:
        worker = make_worker()
        with serving(worker, port, config=MODEL.config, weights_from=folder) as at:
            server = stack.enter_context(asking(at, folder, deadline=60))
            engine = make_engine(server)
            engine.submit(*requests(range(12)))
            found |= {node.uid: node for node in engine.collect()}
            worker.call(lambda _: time.sleep(2))  # longer than it waits for those that it answers
        assert 0 < len(found) < 12
        again = make_worker(8)
        with serving(again, port, config=MODEL.config, weights_from=folder):
            assert_same_nodes(found | collected(engine), healthy)
            assert again.tag == server.tag


# --- other weights than were published ---------------------------------------------------------------------------------------


def test_a_server_that_goes_on_with_old_weights_is_found_out_at_once(url, folder, worker):
    taken = Response(json.dumps({"success": True}))
    with troubled(url, lambda path, body: taken if path == "/update_weights_from_disk" else None) as at, \
            asking(at, folder) as server:
        before = worker.tag
        with pytest.raises(external.Refusal) as found:
            server.publish(weights(21))
        assert f"was given the weights {server.tag!r} and says that it serves {before!r}" in str(found.value)


def test_a_server_that_takes_no_weights_is_refused(url, folder, tmp_path):
    no = Response(json.dumps({"success": False, "message": "the disk is full"}))
    with troubled(url, lambda path, body: no if path == "/update_weights_from_disk" else None) as at, \
            asking(at, folder) as server, pytest.raises(external.Refusal, match="did not take the weights.*the disk is full"):
        server.publish(weights(21))
    with asking(url, tmp_path) as server, pytest.raises(external.Refusal, match="status 403: .* from where this server takes"):
        server.publish(weights(21))


def test_answers_by_other_weights_are_not_learned_from(url, folder, worker):
    """The list of models names the right weights, and the answers come of others."""
    def lie(answer):
        answer["choices"][0]["weight_versions"] = None
        answer["metadata"]["weight_version"] = "forgotten"

    with troubled(url, lambda path, body: lie if path == "/v1/completions" else None) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Stale, match=f"answers with the weights 'forgotten'; the run published '{server.tag}'"):
            engine.collect()


def test_what_another_client_publishes_in_between_is_put_right(server, url, folder, healthy, worker):
    with asking(url, folder) as other:
        engine = make_engine(server)
        other.publish(weights(31))
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)
        assert worker.tag == server.tag


# --- whole runs -------------------------------------------------------------------------------------------------------------


def config_of(url, folder, **changes):
    """A short run that is rewarded for lower-case letters, on the game with `environment`, else in single turns."""
    c = chatter.get_config(**{"server.url": url, "server.weights": str(folder), "server.deadline": 60.0, "eval.every": 0,
                              "environment": "", "task": "arithmetic(level=digit)",
                              "rewards": "format(pattern='(?s).*[a-z].*')", "sampling.max_tokens": 8, **changes})
    return c


GAME = {"environment": "chatter:letters", "task": "arithmetic", "rewards": "", "sampling.max_tokens": 32}


@pytest.mark.slow
@pytest.mark.parametrize("changes", (
    {"sampling.temperature": 0.7, "sampling.stop_strings": ("zz",), "lora.rank": 2}, GAME), ids=("adapters", "game"))
def test_a_run_samples_from_a_server(url, worker, tmp_path, folder, changes):
    config = config_of(url, folder, **changes)
    loop.train(config, tmp_path)
    lines = run_files.lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines[1:]:
        assert line["skipped_updates"] == 0 and line["grad_norm"] > 0 and line["max/mismatch"] < 2e-5
    found = trained(tmp_path)  # which samples by itself
    assert found.source.server is None and found.step == 3
    whole = found.params if found.lora is None else merge(found.params, found.lora)
    assert worker.tag == digest(jax.device_get(whole))  # of the evaluation after the last step


@pytest.mark.slow
def test_a_run_whose_server_fails_goes_on_with_the_next(url, tmp_path, folder):
    """It ends with the step before saved, and resumed becomes what it would have been."""
    asked = []

    def dies(path, body):
        asked.extend([1] if path == "/v1/completions" else [])
        return error(400) if len(asked) > 2 * 16 + 5 + 16 else None  # in the second step, behind the evaluation

    config = config_of(url, folder)
    loop.train(config, tmp_path / "straight")
    assert all(line["max/mismatch"] < 2e-5 for line in run_files.lines(tmp_path / "straight")[1:])
    with troubled(url, dies) as at, pytest.raises(external.Refusal, match="status 400: not now") as found:
        loop.train(config_of(at, folder), tmp_path / "broken")
    assert "trajectory" in found.value.__notes__[0]
    with pytest.warns(RuntimeWarning, match="server.url"):
        loop.train(config, tmp_path / "broken", resume=True)
    plain = config_of("", folder)
    run_files.assert_same(*(run_files.saved(tmp_path / name, plain) for name in ("broken", "straight")))


def steps_of(config):
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    return schedules.sync(run.source, run.learner, state, run.learner.frozen(state.params))


def test_a_server_with_other_weights_ends_the_run(url, folder):
    """It says that it serves what was published, and does not: the log-probs show it."""
    tag = []
    with asking(url, folder) as server:
        server.publish(weights(41))

    def pretend(path, body):
        if path == "/update_weights_from_disk":
            tag[:] = [body["weight_version"]]
            return Response(json.dumps({"success": True}))
        if path == "/v1/models":
            return lambda answer: answer["data"][0].update(metadata={"weight_version": tag[0] if tag else "another"})
        return choice(lambda one: one.update(weight_versions=tag * len(one["token_ids"])))

    with troubled(url, pretend) as at:
        with pytest.raises(external.Mismatch) as found:
            next(steps_of(config_of(at, folder)))
        said = f"{at} says that it serves the weights {tag[0]!r}; the run published {tag[0]!r}"
        assert said in str(found.value) and "more than server.max_mismatch=0.05" in str(found.value)
        next(steps_of(config_of(at, folder, **{"server.max_mismatch": 100.0})))


def test_a_mismatch_that_is_no_number_is_left_to_the_learner(server):
    server.check({"mismatch/kl": float("nan")})
    server.check({})
    for gap in (0.06, -0.06):
        with pytest.raises(external.Mismatch, match="mismatch/kl is -?0.06 nats a token"):
            server.check({"mismatch/kl": gap})


def test_entropies_of_a_server_that_has_none_are_missing_from_the_page(url, folder, tmp_path):
    def vague(path, body):
        return choice(lambda one: [one.pop(name) for name in ("entropies", "weight_versions")]
                      ) if path == "/v1/completions" else None

    with troubled(url, vague) as at:
        run, params = setup.build(config_of(at, folder))
        forest = run.source.next(setup.initial_state(run, params)).forest
    assert np.isnan(forest.entropies[forest.logprobs < 0]).all() and (forest.logprobs < 0).any()
    pages.write_page(tmp_path, 1, run.source, forest, {})
    for row in (tmp_path / "samples/step_000001.jsonl").read_text().splitlines():
        assert "NaN" not in row and "logprobs" in json.loads(row) and "entropies" not in json.loads(row)


def test_a_server_that_holds_too_few_tokens_is_refused_before_the_first_step(tmp_path, folder):
    with serving(make_worker(slot_tokens=20), config=MODEL.config, weights_from=folder) as at, \
            pytest.raises(external.Refusal, match=r"may have 24 tokens, and .* holds 20; start it for 24"):
        next(steps_of(config_of(at, folder)))


@pytest.mark.parametrize(("changes", "reason"), (
    ({"server.weights": ""}, "config.server.weights to a folder that both see"),
    ({"server.url": "127.0.0.1:8000"}, "give an address such as http://127.0.0.1:8000"),
    ({"server.url": "http:///v1"}, "give an address such as"),
    ({"server.deadline": 0.0}, "server.deadline is 0.0"),
    ({"server.max_mismatch": -1.0}, "server.max_mismatch"),
    ({"method": "aepo_advantage"}, "reads the sampler's entropies")))
def test_what_cannot_work_is_refused_before_anything_is_asked(changes, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        setup.build(config_of("http://127.0.0.1:1", tmp_path, **changes))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxrl_llm\[external\]'"):
        external.Client("http://127.0.0.1:1")


def test_servers_are_named_with_or_without_their_version():
    for given in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        client = external.Client(given)
        assert client.url == "http://a:1"
        client.close()
