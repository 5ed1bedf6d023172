"""A real server on a loopback port, asked by the official client: tokens of the engine, shared slots, faults on purpose."""
import concurrent.futures
import json
import shutil
import socket
import threading
import urllib.parse

import httpx
import jax
import numpy as np
import openai
import pytest
from server import KEY, MODEL, SLOTS, TOKENIZER, make_worker, params, sampled, serving, until

from jaxrl_llm.engines import Sampling
from jaxrl_llm.engines import engine as engines
from jaxrl_llm.models import weights
from jaxrl_llm.serving.requests import ClientLimits
from jaxrl_llm.serving.worker import Worker
from jaxrl_llm.tokenizers import conversation

PROMPT = [257, *b"the prompt"]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say <|eos|> once"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def worker():
    return make_worker()


@pytest.fixture(scope="module")
def url(worker, tmp_path_factory):
    limits = ClientLimits(completions=16, requests=8, body=20_000)
    with serving(worker, weights_from=tmp_path_factory.getbasetemp(), limits=limits) as at:
        yield at


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def complete(client, **fields):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 5, "logprobs": 0, "extra_body": IDS}
    return client.completions.create(**(asked | fields))


def test_completions_are_those_of_the_engine(client):
    answer = complete(client, n=3)
    expected = sampled(PROMPT, range(5, 8), 12)
    for i, choice in enumerate(answer.choices):
        node = expected[5 + i]
        assert choice.index == i and choice.token_ids == node.tokens.tolist() and choice.prompt_token_ids == PROMPT
        np.testing.assert_allclose(choice.logprobs.token_logprobs, node.logprobs, atol=1e-5)
        np.testing.assert_allclose(choice.entropies, node.entropies, atol=1e-5)
        assert choice.finish_reason == {"stop": "stop", "limit": "length"}[node.finish]
        assert choice.text == TOKENIZER.decode(node.tokens) and choice.weight_versions == ["first"] * len(node.tokens)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == len(node.tokens)
    made = sum(len(choice.token_ids) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), made)
    assert answer.metadata == {"weight_version": "first"} and answer.object == "text_completion"


def test_chats_go_through_the_template_with_their_tools(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=12, seed=5, logprobs=True,
                                            extra_body=IDS)
    prompt = conversation.start(TOKENIZER, MESSAGES, tools=TOOLS)
    assert "[look;]" in TOKENIZER.decode(prompt) and 258 not in prompt
    node, choice = sampled(prompt, [5], 12)[5], answer.choices[0]
    assert answer.prompt_token_ids == prompt and choice.token_ids == node.tokens.tolist()
    assert choice.message.content == TOKENIZER.decode(node.tokens) and choice.message.role == "assistant"
    np.testing.assert_allclose([one.logprob for one in choice.logprobs.content], node.logprobs, atol=1e-5)
    without = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=1,
                                             extra_body=IDS)
    assert without.prompt_token_ids == conversation.start(TOKENIZER, MESSAGES)


def test_a_stream_brings_the_same_piece_by_piece(client):
    whole = complete(client, n=2, max_tokens=30)
    texts, ids, finishes, chunks = ["", ""], [[], []], {}, 0
    for chunk in complete(client, n=2, max_tokens=30, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            finishes[choice.index] = choice.finish_reason
            chunks += 1
    assert chunks > 4 and chunk.usage == whole.usage and not chunk.choices
    for i, choice in enumerate(whole.choices):
        assert (texts[i], ids[i], finishes[i]) == (choice.text, choice.token_ids, choice.finish_reason)
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 5}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**chat, stream=True)]
    assert "".join(delta.content for delta in deltas) == client.chat.completions.create(**chat).choices[0].message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)


def test_stop_texts_end_completions_and_are_never_seen(client):
    free = complete(client, max_tokens=40).choices[0]
    text = free.text
    start = next(i for i in range(8, len(text) - 3) if "\N{REPLACEMENT CHARACTER}" not in text[i:i + 2])
    stop = text[start:start + 2]
    kept = text[:text.index(stop)]
    choice = complete(client, max_tokens=40, stop=["never", stop]).choices[0]
    assert choice.text == kept and choice.finish_reason == "stop" and choice.stop_reason == stop
    assert stop in TOKENIZER.decode(choice.token_ids) and free.token_ids[:len(choice.token_ids)] == choice.token_ids
    seen = ""
    for chunk in complete(client, max_tokens=40, stop=stop, stream=True):
        seen += chunk.choices[0].text
        assert kept.startswith(seen)
    assert seen == kept


def test_other_stop_tokens_end_completions(client):
    tokens = complete(client).choices[0].token_ids
    choice = complete(client, extra_body=IDS | {"stop_token_ids": [tokens[4]]}).choices[0]
    assert choice.token_ids == tokens[:tokens.index(tokens[4]) + 1] and choice.stop_reason == tokens[4]
    assert choice.text == TOKENIZER.decode(choice.token_ids[:-1])


@pytest.mark.parametrize("fields, sampling", [
    ({"temperature": 0}, Sampling(0.0)), ({"temperature": 1.5, "top_p": 0.5}, Sampling(1.5, top_p=0.5)),
    ({"extra_body": IDS | {"top_k": 3}}, Sampling(1.0, top_k=3)),
    ({"extra_body": IDS | {"min_p": 0.3}}, Sampling(1.0, min_p=0.3))])
def test_distributions_are_those_asked_for(client, fields, sampling):
    node, choice = sampled(PROMPT, [5], 12, sampling=sampling)[5], complete(client, **fields).choices[0]
    assert choice.token_ids == node.tokens.tolist()
    np.testing.assert_allclose(choice.logprobs.token_logprobs, node.logprobs, atol=1e-5)


def test_log_probs_at_temperature_0_are_those_of_temperature_1(client):
    """As OpenAI and vLLM have it: the draw is certain, and its log-prob says how likely the model holds it."""
    choice = complete(client, temperature=0, max_tokens=6).choices[0]
    ids = np.array([PROMPT + choice.token_ids])
    states = MODEL.hidden_states(params(), ids, np.ones_like(ids, bool))[0]
    logits = np.asarray(states[0] @ params()["unembed"].T, np.float64)[len(PROMPT) - 1:-1]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert logits.argmax(-1).tolist() == choice.token_ids
    np.testing.assert_allclose(choice.logprobs.token_logprobs, expected.max(-1), atol=1e-4)
    assert max(choice.logprobs.token_logprobs) < -0.01


def test_the_model_is_found_by_its_name(client):
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="model='runs/other' is not served here; give 'tiny'"):
        client.models.retrieve("runs/other")


def test_many_clients_share_the_slots(client):
    """More requests than slots, of lengths and seeds of their own: none changes another."""
    def ask(i):
        return complete(client, seed=i, max_tokens=5 + i, stream=False).choices[0].token_ids

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        result = list(pool.map(ask, range(16)))
    for i in range(16):
        assert result[i] == sampled(PROMPT, [i], 5 + i)[i].tokens.tolist()


def running(worker):
    return worker.call(lambda engine: engine.running).result()


def held(worker, first=lambda engine: None):
    """Makes the engine's thread do something, then wait between two chunks; `(it waits, the event that releases it)`."""
    waits, event = threading.Event(), threading.Event()
    worker.call(lambda engine: (first(engine), waits.set(), event.wait(60)))
    return waits, event


def in_between(worker, ask, happens):
    """The result of `ask()`, with `happens(engine)` after the first step for it."""
    waits, event = held(worker)
    waits.wait()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(ask)
        until(lambda: worker._inbox.qsize())
        done = worker.call(lambda engine: (engine.step(), happens(engine)))
        event.set()
        assert done.result()[0]
        return answer.result()


@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_a_client_that_goes_away_frees_its_rows(client, url, worker, kind):
    waits, event = held(worker)
    waits.wait()
    address = urllib.parse.urlsplit(url)
    body = {"prompt": PROMPT, "max_tokens": 100, "n": SLOTS, "seed": 5, "stream": kind == "stream"}
    with socket.create_connection((address.hostname, address.port)) as raw:
        content = json.dumps(body).encode()
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: worker._inbox.qsize())
        result = []
        waits, second = held(worker, lambda engine: (engine.step(), result.extend(engine.running)))
        event.set()
        waits.wait()
        assert len(result) == SLOTS
    until(lambda: worker._inbox.qsize())  # the engine has noticed it
    after = worker.call(lambda engine: (engine.running, len(engine._queue)))
    second.set()
    assert after.result() == ((), 0)  # no chunk ran in between: they were stopped, and did not end by themselves
    assert complete(client).choices[0].token_ids == sampled(PROMPT, [5], 12)[5].tokens.tolist()


# --- failures ---------------------------------------------------------------------------------------------------------------


def test_rows_lost_by_the_device_are_computed_again(client, worker):
    def lose(engine):
        for array in jax.tree.leaves(engine._caches.slots):
            array.delete()

    choices = in_between(worker, lambda: complete(client, max_tokens=60, n=2), lose).choices
    expected = sampled(PROMPT, [5, 6], 60)
    assert [choice.token_ids for choice in choices] == [expected[5].tokens.tolist(), expected[6].tokens.tolist()]


def test_rows_that_fail_twice_are_given_up_and_others_continue(client, worker, monkeypatch):
    decode, calls = engines.programs_of.decode, []

    def broken(model, weights, slots, lanes, *arguments, **options):
        if np.isin(np.asarray(lanes.uid)[:, 1], 77).any():
            calls.append(1)
            raise RuntimeError("the device is on fire")
        return decode(model, weights, slots, lanes, *arguments, **options)

    monkeypatch.setattr(engines.programs_of, "decode", broken)
    with pytest.raises(openai.InternalServerError, match="the device is on fire") as result:
        complete(client, seed=77)
    assert result.value.body["type"] == "server_error" and len(calls) == 2
    with pytest.raises(openai.APIError, match="the device is on fire"):  # the status of a stream has been sent
        list(complete(client, seed=77, stream=True))
    assert complete(client).choices[0].token_ids == sampled(PROMPT, [5], 12)[5].tokens.tolist()
    assert worker.alive and not running(worker)


def refused(client, kind, **fields):
    with pytest.raises(kind) as result:
        complete(client, **fields)
    return result.value


def test_errors_are_in_the_format_of_openai(client, url):
    error = refused(client, openai.BadRequestError, max_tokens=1000)
    assert error.body["code"] == "context_length_exceeded" and error.body["param"] == "max_tokens"
    assert "this server holds 128 in all" in error.message
    assert refused(client, openai.NotFoundError, model="other").code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="see GET /v1/models"):
        client.embeddings.create(model="tiny", input="a")

    def post(content, kind="application/json"):
        answer = httpx.post(url + "/v1/completions", content=content, headers={"Content-Type": kind})
        return answer.status_code, answer.json()["error"]["message"]

    assert post(b"{")[1].startswith("the body is not JSON: Expecting property name") and post(b"{")[0] == 400
    assert post(rb'{"\ud800": 1}')[0] == 400 and r"unknown field '\ud800'" in post(rb'{"\ud800": 1}')[1]
    assert post(b"[" * 15000)[0] == 400 and post(b"\xff")[0] == 400
    assert post(b"{}", "text/plain")[0] == 415  # what a page of a browser may send to another host
    assert post(b" " * 20_001)[0] == 413
    assert httpx.get(url + "/v1/completions").status_code == 405


@pytest.mark.slow
def test_too_many_requests_are_refused_and_earlier_ones_continue():
    one = make_worker()
    with serving(one, limits=ClientLimits(requests=1)) as url, \
            openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        errors = []
        answer = in_between(one, lambda: complete(client, max_tokens=100),
                            lambda engine: errors.append(refused(client, openai.RateLimitError)))
        assert "1 requests are being answered" in errors[0].message and errors[0].response.headers["retry-after"] == "1"
        assert answer.choices[0].token_ids == sampled(PROMPT, [5], 100)[5].tokens.tolist()
        with pytest.raises(openai.BadRequestError):  # nothing refused counts
            complete(client, max_tokens=1000)
        assert complete(client).choices


def test_only_those_with_the_token_are_answered():
    with serving(make_worker(), token="secret") as url:
        def status(path, **headers):
            return httpx.get(url + path, headers=headers).status_code

        assert status("/health") == 200 and status("/v1/models") == 401
        for wrong in ("secret", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret", "Bearer s\u00e9cret"):
            assert httpx.get(url + "/v1/models", headers={"Authorization": wrong.encode()}).status_code == 401
        assert status("/v1/models", Authorization="Bearer secret") == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/update_weights_from_disk"):
            answer = httpx.post(url + path, json={})
            assert answer.status_code == 401 and "Bearer TOKEN" in answer.json()["error"]["message"]
        with openai.OpenAI(base_url=url + "/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "tiny"


# --- weights ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def update(url):
    def post(path, tag="second"):
        return httpx.post(url + "/update_weights_from_disk", json={"model_path": str(path), "weight_version": tag}, timeout=60)
    return post


def test_weights_are_published_between_chunks(tmp_path, worker, client, update):
    weights.save_hf(tmp_path / "second", MODEL.config, jax.device_get(params(1)))
    weights.save_hf(tmp_path / "first", MODEL.config, jax.device_get(params(0)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        updates = []
        def publish(engine):
            updates.append(pool.submit(update, tmp_path / "second"))
            until(lambda: worker._inbox.qsize())
        choice = in_between(worker, lambda: complete(client, max_tokens=100, seed=9), publish).choices[0]
        assert updates[0].result().json() == {"success": True, "message": "serving second", "weight_version": "second"}
    versions = choice.weight_versions
    assert len(versions) > 8 and versions == sorted(versions) and set(versions) == {"first", "second"}  # a row continues
    answer = complete(client)
    assert answer.metadata["weight_version"] == client.models.list().data[0].metadata["weight_version"] == "second"
    assert answer.choices[0].token_ids == sampled(PROMPT, [5], 12, weights=1)[5].tokens.tolist()
    assert answer.choices[0].weight_versions == ["second"] * len(answer.choices[0].token_ids)
    assert update(tmp_path / "first", "first").status_code == 200
    assert complete(client).choices[0].token_ids == sampled(PROMPT, [5], 12)[5].tokens.tolist()


def test_weights_have_their_tag_as_soon_as_they_are_in_use():
    """Requests that are answered during a publication read the tag in the middle of it."""
    class Watched(engines.SlotEngine):
        def publish(self, *given):
            super().publish(*given)
            seen.extend(one.tag for one in workers)

    seen, workers = [], []
    one = Worker(Watched(MODEL, params(), KEY, slots=1, slot_tokens=8), "first")
    workers.append(one)
    one.publish("second", params(1)).result()
    assert seen == ["second"] == [one.tag]
    with pytest.raises(ValueError, match="another policy"):
        one.publish("third", {}).result()
    assert one.tag == "second" and one.tags == {0: "first", 1: "second"}
    one.close()


def test_weights_that_cannot_be_served_change_nothing(tmp_path, client, url, update, worker):
    weights.save_hf(tmp_path / "good", MODEL.config, jax.device_get(params(1)))
    shutil.copytree(tmp_path / "good", tmp_path / "cut")
    file = tmp_path / "cut/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    shutil.copytree(tmp_path / "good", tmp_path / "others")
    described = json.loads((tmp_path / "others/config.json").read_text())
    (tmp_path / "others/config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.5}))
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name, changes in (("a text", {"hidden_size": "a"}), ("no heads", {"num_key_value_heads": 0}),
                          ("no object", {"rope_scaling": "a"})):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps(described | changes))
    for path, status, reason in ((tmp_path / "cut", 400, "cut"), (tmp_path / "none", 400, "none"),
                                 (tmp_path / "a text", 400, "a text/config.json: hidden_size='a'"),
                                 (tmp_path / "no heads", 400, "num_key_value_heads="),
                                 (tmp_path / "no object", 400, "rope_scaling"),
                                 ("\0", 400, "printable characters"), ("~nosuchuser/x", 400, "nosuchuser"),
                                 (tmp_path / ("a" * 5000), 400, "name too long"), (tmp_path / "circle", 400, "circle"),
                                 (tmp_path / "others", 400, "another architecture"), ("/etc", 403, "does not lie in"),
                                 (tmp_path / "good/../../../../etc", 403, "does not lie in")):
        answer = update(path)
        assert answer.status_code == status and reason in answer.json()["error"]["message"], answer.text
    answer = httpx.post(url + "/update_weights_from_disk", json={"model_path": "x"})
    assert answer.status_code == 400 and "weight_version" in answer.json()["error"]["message"]
    assert worker.tag == "first" and complete(client).choices[0].token_ids == sampled(PROMPT, [5], 12)[5].tokens.tolist()


def test_weights_are_taken_from_nowhere_unless_a_folder_is_named(tmp_path):
    with serving(make_worker()) as url:
        answer = httpx.post(url + "/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "x"})
    assert answer.status_code == 403 and "--weights_from" in answer.json()["error"]["message"]


def test_a_closed_worker_says_so():
    one = make_worker()
    with serving(one) as url:
        assert httpx.get(url + "/health").status_code == 200
        one.close()
        assert httpx.get(url + "/health").status_code == 503
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and "closed" in answer.json()["error"]["message"]
