"""One thread that owns an engine: requests of many clients share its slots and receive their tokens as they are sampled."""
import contextlib
import dataclasses
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.engines.engine import Node, Request, SlotEngine

_ATTEMPTS = 2  # consecutive failed steps after which running rows are given up


class Failure(Exception):
    """The engine lost a row: what happened."""


class Closed(RuntimeError):
    """The engine's thread has ended."""


Listener = Callable[[Node | Failure], None]


@dataclasses.dataclass
class _Watched:
    """The listener of a row, and how many of its tokens have been passed on."""

    listener: Listener
    passed: int = 0


class Worker:
    """Runs an engine in its own thread, chunk by chunk, as long as there are rows.

    Everything that touches the engine goes through `call`, which runs between two chunks. Listeners are called in the engine's
    thread, so they must return at once.

    Attributes:
      tags: names of the weights by the engine's version.
      active: when a call or a step ended last (time.monotonic).
    """

    def __init__(self, engine: SlotEngine, tag: str = "0"):
        self.tags, self.active = {engine.version: tag}, time.monotonic()
        self._engine, self._uids = engine, itertools.count()
        self._watched: dict[int, _Watched] = {}
        self._inbox: queue.SimpleQueue[tuple[Callable[[SlotEngine], Any], Future] | None] = queue.SimpleQueue()
        self._failures, self._closed, self._lock = 0, False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive() and not self._closed

    @property
    def tag(self) -> str:
        """Tag of the weights in use."""
        return self.tags[self._engine.version]

    @property
    def mesh(self) -> Mesh | None:
        """The devices of the engine; None: one device."""
        return self._engine.mesh

    @property
    def vocab_size(self) -> int:
        """How many tokens the model embeds."""
        return self._engine.vocab_size

    @property
    def slot_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its completion together."""
        return self._engine.slot_tokens

    def call(self, function: Callable[[SlotEngine], Any]) -> Future:
        """`function(engine)` in the engine's thread, before its next chunk. Raises `Closed` after `close`."""
        with self._lock:  # nothing enters the inbox after it was emptied for the last time
            if self._closed:
                raise Closed("the engine was closed; start the server again")
            future: Future = Future()
            self._inbox.put((function, future))
        return future

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> Future:
        """Queues rows, all or none, and assigns their uids; the future returns these.

        A listener gets nodes: new tokens of its row as they are sampled, with the finish "running", and a last one that says
        why the row ended; or a final `Failure`. The future raises ValueError for requests that the engine refuses.
        """
        def start(engine):
            uids = [next(self._uids) for _ in requests]
            engine.submit(*(dataclasses.replace(one, uid=uid) for one, uid in zip(requests, uids)))
            self._watched |= {uid: _Watched(listener) for uid, listener in zip(uids, listeners, strict=True)}
            return uids

        return self.call(start)

    def release(self, uids: Sequence[int]) -> Future:
        """Stops those of these rows that are still running; their listeners get nothing more."""
        def stop(engine):
            for uid in [uid for uid in uids if self._watched.pop(uid, None) is not None]:
                with contextlib.suppress(KeyError):  # it ended in the chunk that was in flight
                    engine.release(uid)
            self._pass_on(engine)

        return self.call(stop)

    def publish(self, tag: str, params: Any) -> Future:
        """Uses other weights from the next chunk on. The future raises ValueError for weights of another model."""
        def change(engine):
            version = engine.version + 1
            self.tags[version] = tag  # first, as other threads read the tag of the engine's version at any time
            try:
                engine.publish(version, params)
            except BaseException:
                del self.tags[version]
                raise

        return self.call(change)

    def close(self) -> None:
        """Ends the thread after its chunk; running rows are lost."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._heard():
                self._step()
                self.active = time.monotonic()
        finally:
            with self._lock:
                self._closed = True
            self._give_up("the server is closing")

    def _heard(self) -> bool:
        """Runs the queued calls, and waits for one if no row is running; False: the thread should end."""
        wait = not self._watched
        while wait or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            function, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:  # only the caller hears of it, in a form that every future takes
                    future.set_exception(error if isinstance(error, Exception) and not isinstance(error, StopIteration)
                                         else RuntimeError(f"{type(error).__name__}: {error}"))
            self.active = time.monotonic()
            wait = not self._watched
        return True

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._recover(error)
        else:
            self._failures = 0
        self._pass_on(self._engine)

    def _recover(self, error: Exception) -> None:
        """Restarts rows from their tokens; if that fails too, running rows are given up and the others continue."""
        self._failures += 1
        running = self._engine.running if self._failures >= _ATTEMPTS else ()
        self._engine.recover()
        for uid in running:
            self._engine.release(uid)
            if (watched := self._watched.pop(uid, None)) is not None:
                watched.listener(Failure(f"{type(error).__name__}: {str(error)[:300]}"))
        if running:
            self._failures = 0

    def _pass_on(self, engine: SlotEngine) -> None:
        """Passes on finished nodes, and new tokens of running rows."""
        for node in engine.finished():
            watched = self._watched.pop(node.uid, None)
            if watched is not None:
                watched.listener(_behind(node, watched.passed))
        for uid in engine.running:
            watched = self._watched.get(uid)
            if watched is not None and len((node := engine.written(uid, watched.passed)).tokens):
                watched.passed += len(node.tokens)
                watched.listener(node)

    def _give_up(self, reason: str) -> None:
        for watched in self._watched.values():
            watched.listener(Failure(reason))
        self._watched.clear()
        while not self._inbox.empty():
            if (item := self._inbox.get()) is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(Closed(reason))


def _behind(node: Node, count: int) -> Node:
    """The node without its first `count` tokens."""
    cut = {name: getattr(node, name)[count:] for name in ("tokens", "logprobs", "entropies", "policy_version")}
    return dataclasses.replace(node, start=node.start + count, **cut)
