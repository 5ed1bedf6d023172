"""Clients that try to keep the server from others: requests that never end, places that are kept, bodies that cost much."""
import asyncio
import socket
import threading

import pytest
from in_process import ask
from server import MODEL, TEMPLATE, TOKENIZER, make_worker, serving

from jaxrl_llm.serving.app import ServedModel, make_app
from jaxrl_llm.serving.connections import Connection
from jaxrl_llm.serving.http import in_thread, is_loopback
from jaxrl_llm.serving.requests import ClientLimits, RequestError, read
from jaxrl_llm.tokenizers import ByteTokenizer

BODY = {"prompt": "a", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def worker():
    one = make_worker()
    yield one
    one.close()


def application(worker, tokenizer=TOKENIZER, token="", **limits):
    return make_app(ServedModel("tiny", MODEL.config, tokenizer, worker, token, ClientLimits(**limits)))


def test_a_stop_iteration_in_a_thread_is_an_error_and_no_silence(worker):
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(in_thread(next, iter(())), 20))

    async def asked():
        return await asyncio.wait_for(asyncio.wrap_future(worker.call(lambda engine: next(iter(())))), 20)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asked())
    with pytest.raises(RuntimeError, match="SystemExit"):  # it would have ended the engine, and this request never
        worker.call(lambda engine: exit()).result(20)
    assert worker.alive


class Exhausted(ByteTokenizer):
    """A tokenizer that fails at one text as a search without a result does."""

    def encode(self, text, **options):
        return super().encode(text, **options) if text == "a" else next(iter(()))


def test_a_request_that_the_server_fails_at_is_answered_and_its_place_is_free(worker):
    async def both():
        app = application(worker, Exhausted(TEMPLATE), requests=1)
        with pytest.raises(RuntimeError, match="StopIteration"):  # for the log; the client has its answer before
            await ask(app, "/v1/completions", {"prompt": "b"})
        return await ask(app, "/v1/completions", BODY)

    assert asyncio.run(both()).status == 200


class Stuck(ByteTokenizer):
    """A tokenizer that does not return from a certain text until `event`."""

    event = threading.Event()

    def encode(self, text, **options):
        if text == "stuck":
            self.event.wait(60)
        return super().encode(text, **options)


def test_a_thread_that_does_not_return_keeps_no_place(worker):
    async def both():
        app = application(worker, Stuck(TEMPLATE), requests=1, arrival=1)
        first = await ask(app, "/v1/completions", {"prompt": "stuck"})
        Stuck.event.set()
        return first, await ask(app, "/v1/completions", BODY)

    first, second = asyncio.run(both())
    assert first.status == 503 and "within 1 seconds" in first.error and second.status == 200


def test_an_engine_that_does_nothing_keeps_no_place():
    one, event = make_worker(), threading.Event()

    async def both():
        app = application(one, requests=1, stalled=1)
        one.call(lambda engine: event.wait(60))
        first = await ask(app, "/v1/completions", BODY)
        event.set()
        one.call(lambda engine: None).result()
        return first, await ask(app, "/v1/completions", BODY)

    first, second = asyncio.run(both())
    one.close()
    assert first.status == 503 and second.status == 200


def test_bodies_that_do_not_arrive_take_no_place_and_are_given_up(worker):
    async def several():
        app = application(worker, requests=2, arrival=2)
        slow = [asyncio.ensure_future(ask(app, "/v1/completions", b"{", arrives=False)) for _ in range(20)]
        await asyncio.sleep(0)
        return await ask(app, "/v1/completions", BODY), await asyncio.gather(*slow)

    answer, slow = asyncio.run(several())
    assert answer.status == 200 and {one.status for one in slow} == {408}
    assert slow[0].error == "the body did not arrive within 2 seconds"


def test_connections_without_a_request_are_closed_and_others_are_not(monkeypatch):
    monkeypatch.setattr(Connection, "patience", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 30\r\n\r\n"
    body = b'{"prompt": "a", "max_tokens":1'
    with serving(make_worker()) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        silent, slow, waiting = (socket.create_connection(address, 20) for _ in range(3))
        slow.sendall(head[:20])
        waiting.sendall(head + body[:5])
        assert silent.recv(99) == slow.recv(99) == b""
        waiting.sendall(body[5:-1] + b" ")  # longer than the others, and still there
        assert waiting.recv(99).startswith(b"HTTP/1.1 400")
        for one in (silent, slow, waiting):
            one.close()


def test_streams_that_nobody_reads_are_ended(worker):
    async def several():
        app = application(worker, requests=2, unread=0.2)
        unread = [ask(app, "/v1/completions", BODY | {"stream": True}, takes=False) for _ in range(2)]
        ended = await asyncio.gather(*unread)
        return ended, await ask(app, "/v1/completions", BODY | {"stream": True})

    ended, answer = asyncio.run(several())
    assert [one.status for one in ended] == [200, 200] and b"[DONE]" in answer.body


class Counting(ByteTokenizer):
    """A tokenizer that may not be asked."""

    def encode(self, text, **options):
        raise AssertionError("a body that cannot fit was encoded")

    render_chat = encode


@pytest.mark.parametrize("body, what", [
    ({"messages": [{"role": "user", "content": "a" * 8200}]}, "more than 8192 characters"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 20}] * 420}]}, "entries"),
    ({"messages": [{"role": "user", "content": ""}] * 210}, "more than 1024 entries"),
    ({"messages": [{"role": "user", "content": "<|eos|>" * 129}]}, "spells more than 128 control tokens"),
    ({"messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "a"}}] * 200}, "entries"),
    ({"messages": CHAT["messages"], "tools": [{"a": dict.fromkeys(map(str, range(600)))}]}, "entries"),
    ({"messages": CHAT["messages"], "chat_template_kwargs": {"a" * 8200: 1}}, "characters"),
    ({"prompt": ["a", "a" * 8200]}, "characters")])
def test_bodies_that_cannot_fit_are_refused_before_they_are_encoded(body, what):
    """A slot of 128 tokens: 64 characters and 8 entries for each."""
    with pytest.raises(RequestError, match=what) as refused:
        read(body, "messages" in body, Counting(TEMPLATE), 259, 128, "tiny", ClientLimits())
    assert refused.value.status == 400 and refused.value.code == "context_length_exceeded"


def test_prompts_are_encoded_up_to_the_first_that_does_not_fit():
    seen = []

    class Noting(ByteTokenizer):
        def encode(self, text, **options):
            seen.append(text)
            return super().encode(text, **options)

    with pytest.raises(RequestError, match="this server holds 128 in all"):
        read({"prompt": ["a", "b" * 200, *"cdefg"]}, False, Noting(), 259, 128, "tiny", ClientLimits())
    assert seen == ["a", "b" * 200]


HOSTS = dict.fromkeys(("localhost", "localhost:8000", "LOCALHOST.:1", "127.0.0.1:80", "127.1.2.3", "[::1]", "[::1]:80"), True)
HOSTS |= dict.fromkeys(("evil.example:8000", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1",
                        "[::2]:1", "0.0.0.0", "", "[::1].evil.example", "localhost:1.evil.example", "localhost:1@evil.example",
                        "[]", "[localhost].evil.example", "127.1", "2130706433"), False)


def test_without_a_token_only_loopback_names_are_hosts(worker):
    """A page whose name points to 127.0.0.1 asks under its name; with a token the name is free."""
    async def statuses(app, hosts, path, body=None):
        given = {"authorization": "Bearer key"}
        return {host: (await ask(app, path, body, headers=given | {"host": host})).status for host in hosts}

    app = application(worker)
    update = {"model_path": "x", "weight_version": "1"}
    for path, body in (("/v1/models", None), ("/v1/models/tiny", None), ("/v1/completions", BODY),
                       ("/v1/chat/completions", CHAT), ("/update_weights_from_disk", update)):
        right = 403 if path.startswith("/update") else 200
        result = asyncio.run(statuses(app, HOSTS, path, body))
        assert result == {host: right if fine else 403 for host, fine in HOSTS.items()}
    assert asyncio.run(ask(app, "/v1/models", headers={"host": "evil.example"})).error.startswith("the host 'evil.example'; ")
    assert set(asyncio.run(statuses(application(worker, token="key"), HOSTS, "/v1/models")).values()) == {200}
    assert is_loopback("::1") and not is_loopback("::ffff:8.8.8.8") and not is_loopback("localhost:1")
