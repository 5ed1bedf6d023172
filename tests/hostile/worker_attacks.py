"""Reward functions with the possible effects of a hostile completion; worker processes of the tests import them."""

import decimal
import fractions
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np


def attack(completion, answer, problem):
    """The completion names the attack."""
    return ATTACKS.get(completion, lambda: float(completion == answer))()


def value(completion, answer, problem):
    """The completion names the value."""
    return VALUES[completion]()


def _sleeper():
    return subprocess.Popen(["sleep", "600"])


def fork_and_return():
    """The child returns from the function and would answer too."""
    os.fork()
    return 0.25


def fork_setsid():
    """A child that leaves the session and outlives its parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(0)
    return 0.25


def fork_chain():
    """A process that ends before a scan sees it: it forks, leaves its session and ends, again and again."""
    if os.fork() == 0:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            os.setsid()
    return 0.25


def fork_many():
    for _ in range(40):
        _sleeper()
    return 0.25


def poison():
    """The process ends a little later, in the middle of another call or of none."""
    threading.Timer(0.5, lambda: os._exit(7)).start()
    time.sleep(0.1)  # long enough for every worker to get one
    return 0.25


def kill_the_keeper():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def close_everything():
    os.closerange(0, 1000)
    return 1.0


def write_everywhere():
    """Text that looks like a reply, on every descriptor that takes it."""
    for descriptor in range(100):
        try:
            os.write(descriptor, b'{"number": 1, "value": 99.0}\n{"number": 2, "value": 99.0}\n')
        except OSError:
            pass
    return 0.25


def nested_reply():
    for descriptor in range(100):
        try:
            os.write(descriptor, b"[" * 200_000 + b"\n")
        except OSError:
            pass
    time.sleep(600)


def giant_reply():
    line = b"7" * (1 << 20)
    for descriptor in range(3, 100):
        try:
            for _ in range(1024):
                os.write(descriptor, line)
        except OSError:
            pass
    time.sleep(600)


def read_input():
    return float(len(sys.stdin.read()))


def raise_unprintable():
    class Mute(Exception):
        def __str__(self):
            raise self
    raise Mute


def raise_text():
    raise ValueError("x" * 10_000_000 + "\ud800")


ATTACKS = {
    "sleep": lambda: time.sleep(600), "second": lambda: time.sleep(1) or 0.25,
    "exit": lambda: sys.exit(0), "interrupt": lambda: signal.raise_signal(signal.SIGTERM),
    "fork and return": fork_and_return, "setsid": fork_setsid, "chain": fork_chain, "forty": fork_many,
    "child": lambda: _sleeper() and 0.25, "keeper": kill_the_keeper, "close": close_everything, "write": write_everywhere,
    "nested": nested_reply, "giant": giant_reply, "input": read_input, "mute": raise_unprintable, "text": raise_text,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP), "pid": os.getpid, "poison": poison,
}


def _jax(make):
    import jax.numpy as jnp
    return make(jnp)


VALUES = {
    "bool": lambda: True, "int": lambda: 2, "float": lambda: 0.5, "float32": lambda: np.float32(0.25),
    "int8": lambda: np.int8(3),
    "numpy bool": lambda: np.True_,
    "0-d": lambda: np.array(0.5), "fraction": lambda: fractions.Fraction(1, 4),
    "decimal": lambda: decimal.Decimal("0.25"), "jax": lambda: _jax(lambda jnp: jnp.float32(0.75)),
    "jax bfloat16": lambda: _jax(lambda jnp: jnp.bfloat16(0.5)), "jax bool": lambda: _jax(lambda jnp: jnp.array(True)),
    "none": lambda: None, "text": lambda: "1.0", "bytes": lambda: b"1", "list": lambda: [1.0], "complex": lambda: 1j,
    "1-d": lambda: np.zeros(1), "jax 1-d": lambda: _jax(lambda jnp: jnp.zeros(2)), "nan": lambda: float("nan"),
    "inf": lambda: -np.inf, "large": lambda: 1e300, "10**400": lambda: 10 ** 400, "10**5000": lambda: 10 ** 5000,
    "long": lambda: "x" * (100 << 20), "numpy text": lambda: np.array("1"),
    "object": lambda: np.array(None), "date": lambda: np.datetime64("2020-01-01"),
    "deep": lambda: __import__("functools").reduce(lambda inner, _: [inner], range(100_000), 1.0),
}
