"""One event loop in a separate thread for asynchronous clients; steps of environments are synchronous and wait for it."""
import asyncio
import atexit
import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from jaxrl_llm.environments.base import Late

_LEAVE_LIMIT = 5.0  # seconds at the end of the program for closing all open contexts
_lock = threading.Lock()
_open: set[concurrent.futures.Future] = set()


def wait(coroutine: Coroutine, seconds: float, what: str) -> Any:
    """The result of the coroutine. Raises its errors, and Late if it takes longer; it is then cancelled."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # its own
            raise
        future.cancel()
        raise Late(f"{what}: nothing came back within {seconds:g} s") from None


class OpenContext:
    """An open context: `value` is the result of `async with context`.

    The context is left when this object is gone, in the task that entered it. Raises the errors of entering, and Late if that
    takes longer than a number of seconds. It cannot be copied.
    """

    def __init__(self, context: AbstractAsyncContextManager, seconds: float, what: str):
        entered: concurrent.futures.Future = concurrent.futures.Future()
        leave = asyncio.Event()
        task = asyncio.run_coroutine_threadsafe(_stay(context, entered, leave), _loop())
        _open.add(task)
        task.add_done_callback(_open.discard)
        try:
            self.value = entered.result(seconds)
        except TimeoutError:
            task.cancel()
            raise Late(f"{what}: not open within {seconds:g} s") from None
        weakref.finalize(self, _loop().call_soon_threadsafe, leave.set)

    def __deepcopy__(self, memo):
        raise TypeError("an open connection cannot be copied, so neither can the state of a trajectory that has one")


async def _stay(context: AbstractAsyncContextManager, entered: concurrent.futures.Future, leave: asyncio.Event) -> None:
    try:
        async with context as value:
            entered.set_result(value)
            await leave.wait()
    except BaseException as error:
        if not entered.done():
            entered.set_exception(error)
        if isinstance(error, asyncio.CancelledError):
            raise


def _loop() -> asyncio.AbstractEventLoop:
    with _lock:
        return _started()


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="clients of environments", daemon=True).start()
    atexit.register(_end)  # before this, `weakref.finalize` has asked all contexts to end
    return loop


def _end() -> None:
    concurrent.futures.wait(set(_open), _LEAVE_LIMIT)
