"""The inside of a worker process: import one function, then answer requests until the input closes.

Requests (from the parent, trusted) are pickled argument tuples behind a 4-byte length; replies are single JSON lines,
so that the parent never unpickles what a worker says.
"""

import importlib
import json
import os
import pickle
import resource
import signal
import sys

PARENT_GRACE = 5.0  # seconds past the deadline after which the kernel ends a worker whose parent did not
_FORBIDDEN = ("os.", "shutil.", "socket.", "subprocess.", "ctypes.", "pty.", "urllib.")
_HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.listxattr", "os.getxattr")  # imports look around


def restrict() -> None:
    """From here on this process may read files, but not write one, start a program or open a connection.

    An audit hook, so it holds for text that a library evaluates; it cannot be taken back. It raises PermissionError. A
    second fence, not a sandbox: it does not see what native code does.
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


def serve(target: str, deadline: float, memory_mb: int, restricted: bool) -> None:
    """Answer requests for `target`; every reply is `{"value": ...}` or `{"error": text}`."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints must not mix with the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our input
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def reply(record: dict) -> None:
        replies.write(json.dumps(record, default=float) + "\n")
        replies.flush()

    try:
        function = resolve(target)
    except Exception as error:
        return reply({"error": f"{type(error).__name__}: {error}"})
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    if restricted:
        restrict()
    reply({"value": "ready"})
    while len(header := sys.stdin.buffer.read(4)) == 4:
        # With the default action SIGALRM ends the process even inside a C call that never returns to Python.
        signal.setitimer(signal.ITIMER_REAL, deadline + PARENT_GRACE)
        try:
            arguments = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "big")))
            record = {"value": function(*arguments)}
            json.dumps(record, default=float)  # a value that cannot be sent is an error of the call
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(record)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "restricted")
