"""The process that workers are forked from: it imports their function once and forks a worker, with its keeper, on demand.

Run as `python -m jaxrl_llm.rewards.template SOCKET PARENT TARGET MEMORY restricted|free scores|values`. Every message on the
socket brings three descriptors: requests, replies and the keeper's control. It ends when the socket closes or the process
PARENT is gone. A function whose module has started threads cannot be copied: its workers import it again.
"""
import gc
import os
import select
import signal
import socket
import sys
import threading

from jaxrl_llm.rewards import keeper, worker


def copyable() -> bool:
    """Whether this process has one thread only: others would be missing in a fork, while their locks stay held."""
    if os.path.isdir("/proc/self/task"):
        return len(os.listdir("/proc/self/task")) == 1
    return threading.active_count() == 1


def start(template: socket.socket, descriptors: list[int], function, settings: list[str]) -> None:
    """Forks a keeper with a worker that calls `function`, or imports it again where this is None."""
    requests, replies, control = descriptors
    if os.fork() == 0:
        try:
            template.close()
            os.dup2(requests, 0)
            os.dup2(replies, 1)
            os.close(requests)
            os.close(replies)
            connection = socket.socket(fileno=control)
            command = [sys.executable, "-m", "jaxrl_llm.rewards.worker", *settings]

            def work():
                connection.close()
                if function is None:
                    os.execv(command[0], command)
                worker.serve(function, worker.channels(), *settings[1:])

            keeper.keep(work, connection)
        finally:
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)


def main(template: socket.socket, parent: int, settings: list[str]) -> None:
    """Serves until the run is gone."""
    for number in keeper.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    try:
        function = worker.resolve(settings[0])
    except Exception:  # the worker meets it again and reports it
        function = None
    if not copyable():
        function = None
    gc.freeze()  # pages that no collection touches stay shared
    poll = select.poll()
    poll.register(template, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(keeper.PARENT_CHECK * 1000):
            message, descriptors, _, _ = socket.recv_fds(template, 1, 3)
            if not message:
                return
            start(template, descriptors, function, settings)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
