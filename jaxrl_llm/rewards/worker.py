"""The inside of a worker process: answer requests for one function until the input closes.

A request (from the parent, trusted) is its length and its number, 8 bytes each, then a pickled argument tuple; a reply is
one JSON line with the same number, so that the parent never unpickles what a worker writes.
"""
import importlib
import inspect
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable
from typing import BinaryIO

from jaxrl_llm.rewards.base import number as to_number

MESSAGE_LIMIT = 2000  # characters of an error message
_FORBIDDEN = ("os.", "shutil.", "socket.", "subprocess.", "ctypes.", "pty.", "urllib.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.listxattr", "os.getxattr")  # imports look around


def restrict() -> None:
    """From here on this process may read files, but not write one, start a program or open a connection.

    It is an audit hook, so it covers text that a library evaluates, and it cannot be removed. It raises PermissionError. It is
    a second line of defence, not a sandbox: it does not see what native code does.
    """

    def refuse(event: str, arguments: tuple) -> None:
        writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writing or (event.startswith(_FORBIDDEN) and event not in _HARMLESS):
            raise PermissionError(f"{event} is forbidden in a reward worker")

    sys.addaudithook(refuse)


def resolve(target: str):
    """The function named by `"package.module:function"`."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def as_reward(function: Callable) -> Callable:
    """The function of `(completion, answer, problem)`; one with the arguments of verl's `compute_score` gets them by name.

    Of such a function's dictionary the entry "score" counts, as in verl.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a function in C
        return function
    if not {"solution_str", "ground_truth"} <= {*parameters}:
        return function
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())

    def score(completion, answer, problem):
        row = getattr(problem, "extra", {})
        given = {"data_source": row.get("data_source", ""), "solution_str": completion, "ground_truth": answer,
                 "extra_info": row.get("extra_info")}
        value = function(**{name: one for name, one in given.items() if open_ended or name in parameters})
        return value["score"] if isinstance(value, dict) else value

    return score


def describe(error: BaseException) -> str:
    """Type and text of an error, shortened. A text that cannot be made is omitted."""
    try:
        return f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]
    except Exception:
        return type(error).__name__


def answer(function, request: bytes, scores: bool) -> bytes:
    """What follows the number in the reply: `"value": ...`, a number or null for `scores`, or `"error": text`."""
    try:
        value = function(*pickle.loads(request))
        return b'"value": ' + json.dumps(to_number(value) if scores and value is not None else value, default=float).encode()
    except BaseException as error:  # SystemExit as well: the process has more to answer
        return b'"error": ' + json.dumps(describe(error)).encode()


def channels() -> tuple[BinaryIO, BinaryIO]:
    """Requests and replies, moved away from standard input and output.

    What the function reads, prints and starts must not meet them; children that run another program do not inherit the copies.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return requests, replies


def send(replies: BinaryIO, number: int, content: bytes) -> None:
    """Writes one reply."""
    replies.write(b'{"number": %d, %s}\n' % (number, content))
    replies.flush()


def serve(function, streams: tuple[BinaryIO, BinaryIO], memory_mb: str, restricted: str, scores: str) -> None:
    """Answers requests for `function`; reply 0 means that the worker is ready."""
    requests, replies = streams
    function = as_reward(function) if scores == "scores" else function
    me = os.getpid()
    if int(memory_mb):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_mb) << 20,) * 2)
    if restricted == "restricted":
        restrict()
    send(replies, 0, b'"value": "ready"')
    while len(header := requests.read(16)) == 16:
        content = answer(function, requests.read(int.from_bytes(header[:8], "big")), scores == "scores")
        if os.getpid() != me:  # a child that the function forked and that came back from it
            os._exit(0)
        send(replies, int.from_bytes(header[8:], "big"), content)


def main(target: str, *settings: str) -> None:
    """Imports the function and serves it, or reports in reply 0 why this cannot be done."""
    streams = channels()
    try:
        function = resolve(target)
    except Exception as error:
        return send(streams[1], 0, b'"error": ' + json.dumps(describe(error)).encode())
    serve(function, streams, *settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
