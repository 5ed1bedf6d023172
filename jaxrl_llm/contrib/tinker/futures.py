"""Deferred answers: a request gets an id at once, and its client polls until the answer is there."""
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.responses import Response


@dataclasses.dataclass
class Pending:
    """A future, the function that turns its result into an answer, and until when it is kept (time.monotonic)."""

    future: Future
    answer: Callable[[Any], Response]
    until: float


class Futures:
    """Futures by request id. A request that is sent again under its id because its answer was lost is not done again."""

    def __init__(self, unread: float = 3600.0, read: float = 60.0):
        """`unread`, `read`: seconds for which a result is kept, before and after it was fetched."""
        self._unread, self._read = unread, read
        self._pending: dict[str, Pending] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def open(self) -> int:
        """How many are not done."""
        return sum(not one.future.done() for one in self._pending.values())

    def add(self, request_id: str, future: Future, answer: Callable[[Any], Response]) -> None:
        """Keeps a future; expired results are dropped."""
        now = time.monotonic()
        self._pending = {name: one for name, one in self._pending.items() if not one.future.done() or one.until > now}
        self._pending[request_id] = Pending(future, answer, now + self._unread)

    def get(self, request_id: str) -> Pending:
        """The future. Raises KeyError for one that was never added or is dropped."""
        return self._pending[request_id]

    def was_read(self, request_id: str) -> None:
        """Notes that the result was sent; it is kept a little longer, in case the answer is lost."""
        if request_id in self._pending:
            self._pending[request_id].until = time.monotonic() + self._read
