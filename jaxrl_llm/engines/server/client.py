"""Concurrent HTTP requests to a server, each repeated until it is answered, refused or past its deadline."""
import asyncio
import contextlib
import itertools
import math
import random
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

_FIRST, _LONGEST = 0.1, 10.0  # seconds between two attempts: at first, and at most
_BUSY = (408, 409, 425, 429)  # 4xx statuses that a later attempt may not meet
_GARBLED = 5  # malformed answers after which a request is given up
_SAY = 30.0  # seconds between two log lines about a server that does not answer
_CONNECT = 10.0  # seconds to connect

Answer = TypeVar("Answer")


class ServerError(RuntimeError):
    """A request that was not answered."""


class Fault(ServerError):
    """An attempt that failed and may succeed later: there was no answer, or the server was busy or broken."""


class Garbled(Fault):
    """A malformed answer. The request is repeated a few times, however long the deadline is."""


class Refusal(ServerError):
    """The server understood the request and refused it; another attempt would not change that."""


class Client:
    """Sends requests to one server, from a thread with its own event loop, so that each can be cancelled.

    Attributes:
      url: address of the server, without `/v1`.  deadline: seconds for a request, all attempts together.
    """

    def __init__(self, url: str, token: str = "", deadline: float = 600.0, requests: int = 128):
        """
        Args:
          url: with or without `/v1` at its end.
          token: sent as bearer token; empty: none.
          deadline: seconds for a request, all attempts together, counted from when it is sent.
          requests: maximum number of requests in flight.
        """
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ValueError(f"sampling from the server {url} needs a package: pip install 'jaxrl_llm[external]'") from error
        try:
            parts = urllib.parse.urlsplit(url)
            usable = url.startswith(("http://", "https://")) and parts.hostname and parts.port != 0 and httpx.URL(url).host
        except (ValueError, httpx.InvalidURL):
            usable = False
        if not usable:
            raise ValueError(f"server.url={url!r}; give an address such as http://127.0.0.1:8000")
        self.url, self.deadline = url.rstrip("/").removesuffix("/v1"), deadline
        self._httpx = httpx
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._loop = asyncio.new_event_loop()
        self._turns = asyncio.Semaphore(requests)
        self._session: Any = None
        self._said = -math.inf
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], Answer],
            deadline: float | None = None) -> "Future[Answer]":
        """A future with what `read` returns for the server's JSON answer, or for its text if that is not JSON.

        `read` raises `Garbled` if the request should be repeated, and another `ServerError` if repeating it cannot help. The
        future raises that error, `Refusal`, or `Fault` when the deadline has passed. Cancelling the future cancels the request.

        Args:
          deadline: seconds; None: the client's.
        """
        return asyncio.run_coroutine_threadsafe(self._in_turn(method, path, body, read, deadline or self.deadline), self._loop)

    def close(self) -> None:
        """Ends all requests, and the thread."""
        async def end():
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            if self._session is not None:
                await self._session.aclose()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _in_turn(self, method, path, body, read, deadline):
        async with self._turns:
            start, garbled, before = time.monotonic(), 0, ""
            for attempt in itertools.count():
                try:
                    return read(await self._once(method, path, body, start + deadline - time.monotonic()))
                except Fault as fault:
                    wait = min(_FIRST * 2**attempt, _LONGEST) * random.uniform(0.5, 1.0)
                    garbled += isinstance(fault, Garbled)
                    spent = time.monotonic() - start
                    if spent + wait >= deadline or garbled >= _GARBLED:
                        earlier = f" (before that: {before})" if before not in ("", str(fault)) else ""
                        raise Fault(f"{method} {self.url}{path}: {fault}{earlier}; that was the last of {attempt + 1} attempts "
                                    f"in {spent:.1f} s") from fault
                    before = str(fault)
                    self._say(f"{self.url}: {fault}; asking again for up to {deadline - spent:.0f} s")
                    await asyncio.sleep(wait)

    def _say(self, line: str) -> None:
        """Prints a line, at most every `_SAY` seconds."""
        if time.monotonic() - self._said > _SAY:
            self._said = time.monotonic()
            with contextlib.suppress(OSError):  # nobody may read any more
                print(line, file=sys.stderr, flush=True)

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """One answer. Raises `Fault` and `Refusal`."""
        if self._session is None:
            # Idle connections are closed before servers do it, which would be a fault of the next request.
            limits = self._httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
            self._session = self._httpx.AsyncClient(headers=self._headers, limits=limits, trust_env=False,
                                                    timeout=self._httpx.Timeout(None, connect=_CONNECT))
        try:
            async with asyncio.timeout(seconds):
                answer = await self._session.request(method, self.url + path, json=body)
        except TimeoutError:
            raise Fault("no answer") from None
        except self._httpx.HTTPError as error:
            raise Fault(f"{type(error).__name__} {error}".strip()) from error
        if answer.status_code in _BUSY or answer.status_code >= 500:
            raise Fault(f"status {answer.status_code}: {_reason(answer)}")
        if answer.status_code != 200:
            raise Refusal(f"{method} {self.url}{path}: status {answer.status_code}: {_reason(answer)}")
        try:
            return answer.json()
        except (ValueError, RecursionError):  # thousands of brackets
            return answer.text  # `read` says what is missing


def _reason(answer) -> str:
    """The message of an error answer, in OpenAI's format or any other."""
    try:
        return str(answer.json()["error"]["message"])[:500]
    except (ValueError, RecursionError, KeyError, TypeError):
        return answer.text[:500]
