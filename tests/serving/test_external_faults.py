"""Sampling from a server that fails, answers garbage, dies amid a batch or has other weights than it reports."""
import contextlib
import json
import socket
import time

import numpy as np
import pytest
from asking import (
    MODEL,
    asking,
    assert_same_nodes,
    choice,
    collected,
    error,
    make_engine,
    make_worker,
    requests,
    troubled,
    weights,
)
from server import serving
from starlette.responses import Response

from jaxrl_llm.engines import server as external

pytestmark = pytest.mark.usefixtures("short_waits")


def logprob(value):
    """Gives the first token this log-prob."""
    return choice(lambda one: one["logprobs"]["token_logprobs"].__setitem__(0, value))


GARBAGE = {
    "not JSON": (Response("<html>"), "without one entry in 'choices': '<html>'"),
    "brackets": (Response("[" * 200_000), "without one entry in 'choices': '[[[[["),
    "a list": (Response("[]"), "without one entry in 'choices'"),
    "no choices": (lambda answer: answer.pop("choices"), "without one entry in 'choices'"),
    "two choices": (lambda answer: answer["choices"].append({}), "without one entry in 'choices'"),
    "no log-probs": (choice(lambda one: one.update(logprobs=None)), "token_logprobs are not"),
    "fewer log-probs": (choice(lambda one: one["logprobs"]["token_logprobs"].pop()), "token_logprobs are not"),
    "a log-prob of null": (logprob(None), "null"),
    "a log-prob of NaN": (logprob(float("nan")), "NaN"),
    "a log-prob of 1e300": (logprob(-1e300), "-1e+300"),
    "a log-prob of 400 digits": (logprob(-10**400), "-10000"),
    "a log-prob of true": (logprob(True), "are not 24 numbers: [true"),
    "a log-prob above 0": (logprob(5.0), "has 5; log-probs are 0 at"),
    "an entropy of 1e300": (choice(lambda one: one["entropies"].__setitem__(0, 1e300)), "entropies are not 24 numbers: [1e+"),
    "fewer entropies": (choice(lambda one: one["entropies"].pop()), "entropies are not"),
    "fewer versions": (choice(lambda one: one["weight_versions"].pop()), "weight_versions are not"),
    "no token": (choice(lambda one: one.update(token_ids=[])), "0 token_ids"),
    "too many tokens": (choice(lambda one: one.update(token_ids=[1] * 25)), "25 token_ids; allowed are 1 to 24"),
    "an unknown token": (choice(lambda one: one["token_ids"].__setitem__(0, 259)), "each from 0 to 258"),
    "a token that is a text": (choice(lambda one: one["token_ids"].__setitem__(0, "1")), "each from 0 to 258"),
    "a stop at no stop token": (choice(lambda one: one.update(token_ids=[1] * 24, finish_reason="stop")), "behind the token 1"),
    "an end before the limit": (choice(lambda one: one.update(token_ids=[1] * 23, finish_reason="length")), "after 23 of 24"),
    "an abort": (choice(lambda one: one.update(finish_reason="abort")), "finish_reason is 'abort'"),
}
BUSY = {status: (error(status), f"status {status}: not now") for status in (429, 500, 502, 503)}
DEEP = Response("[" * 200_000, 503)


def first_times(troubles):
    """Trouble for the first requests for completions, one each; the seeds of those requests."""
    left, seeds = list(troubles), []

    def trouble(path, body):
        if path == "/v1/completions" and left:
            seeds.append(body["seed"])
            return left.pop()
        return None
    return trouble, seeds


def test_failed_requests_are_repeated_and_nothing_is_lost(url, folder, healthy):
    troubles = [value for value, _ in [*GARBAGE.values(), *BUSY.values(), (DEEP, "")]]
    trouble, seeds = first_times(troubles)
    with troubled(url, trouble) as at, asking(at, folder, deadline=60) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)
    assert len(seeds) == len(troubles)


@pytest.mark.slow
@pytest.mark.parametrize("kind", GARBAGE)
def test_a_server_that_never_makes_sense_ends_the_run(url, folder, kind):
    trouble, reason = GARBAGE[kind]
    with troubled(url, lambda path, body: trouble if path == "/v1/completions" else None) as at, \
            asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Fault, match="the last of 5 attempts") as value:
            engine.collect()
        assert reason in str(value.value) and at in str(value.value) and "trajectory 0, 11 tokens" in value.value.__notes__[0]


@pytest.mark.slow
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


def test_log_probs_may_exceed_0_by_what_rounding_adds(url, folder):
    above = logprob(1e-4)
    with troubled(url, lambda path, body: above if path == "/v1/completions" else None) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        assert collected(engine)[0].logprobs[0] == np.float32(1e-4)


def test_others_continue_where_one_fails(url, folder, healthy):
    broken = []

    def trouble(path, body):
        if path == "/v1/completions" and (not broken or body["seed"] in broken):
            broken[:] = [body["seed"]]
            return error(400)
        return None

    with troubled(url, trouble) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(4)))
        value, failed = {}, []
        while True:
            try:
                nodes = engine.collect()
            except external.Refusal as refusal:
                failed.append(str(refusal))
                continue
            if not nodes:
                break
            value |= {node.uid: node for node in nodes}
        assert len(value) == 3 and len(failed) == 1 and "status 400: not now" in failed[0]
        assert_same_nodes(value, {uid: healthy[uid] for uid in value})


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
    (choice(lambda one: one.update(prompt_token_ids=[1])), "the server replaces the tokens of the prompt"),
    (error(401), "status 401: not now")))
def test_permanent_faults_end_the_run_at_once(url, folder, change, reason):
    count = []
    with troubled(url, lambda path, body: (count.append(1), change)[1] if path == "/v1/completions" else None) as at, \
            asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Refusal, match=reason):
            engine.collect()
        assert len(count) == 1


@pytest.mark.slow
def test_a_server_that_dies_amid_a_batch_gets_its_weights_again(folder, healthy):
    """It restarts at the same port with other weights than the run's; requests in flight are sampled again."""
    socket_, value = socket.create_server(("127.0.0.1", 0)), {}
    port = socket_.getsockname()[1]
    socket_.close()
    with contextlib.ExitStack() as stack:
        worker = make_worker()
        with serving(worker, port, config=MODEL.config, weights_from=folder) as at:
            server = stack.enter_context(asking(at, folder, deadline=60))
            engine = make_engine(server)
            engine.submit(*requests(range(12)))
            value |= {node.uid: node for node in engine.collect()}
            worker.call(lambda _: time.sleep(2))  # longer than its answers take
        assert 0 < len(value) < 12
        again = make_worker(8)
        with serving(again, port, config=MODEL.config, weights_from=folder):
            assert_same_nodes(value | collected(engine), healthy)
            assert again.tag == server.tag


# --- other weights than were published ---------------------------------------------------------------------------------------


def test_a_server_that_keeps_old_weights_is_detected_at_once(url, folder, worker):
    taken = Response(json.dumps({"success": True}))
    with troubled(url, lambda path, body: taken if path == "/update_weights_from_disk" else None) as at, \
            asking(at, folder) as server:
        before = worker.tag
        with pytest.raises(external.Refusal) as value:
            server.publish(weights(21))
        assert f"was given the weights {server.tag!r} and says that it serves {before!r}" in str(value.value)


def test_a_server_that_takes_no_weights_is_refused(url, folder, tmp_path):
    no = Response(json.dumps({"success": False, "message": "the disk is full"}))
    with troubled(url, lambda path, body: no if path == "/update_weights_from_disk" else None) as at, \
            asking(at, folder) as server, pytest.raises(external.Refusal, match="did not take the weights.*the disk is full"):
        server.publish(weights(21))
    with asking(url, tmp_path) as server, pytest.raises(external.Refusal, match="status 403: .* from where this server takes"):
        server.publish(weights(21))


def test_answers_by_other_weights_are_not_learned_from(url, folder, worker):
    """The list of models names the right weights, and the answers use others."""
    def lie(answer):
        answer["choices"][0]["weight_versions"] = None
        answer["metadata"]["weight_version"] = "forgotten"

    with troubled(url, lambda path, body: lie if path == "/v1/completions" else None) as at, asking(at, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests([0]))
        with pytest.raises(external.Stale, match=f"answers with the weights 'forgotten'; the run published '{server.tag}'"):
            engine.collect()


def test_weights_published_by_another_client_are_replaced(server, url, folder, healthy, worker):
    with asking(url, folder) as other:
        engine = make_engine(server)
        other.publish(weights(31))
        engine.submit(*requests(range(12)))
        assert_same_nodes(collected(engine), healthy)
        assert worker.tag == server.tag
