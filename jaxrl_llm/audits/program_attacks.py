"""Attacks of hostile programs on the code reward, and their outcomes: `python -m jaxrl_llm.audits.verifiers --attacks`.

Every attack is a program that passes its test, stops the run or leaves something behind if a barrier is missing. The answer of
the test is in a file of this machine, in this process's memory and in its environment, and nowhere in the sandbox.
"""
import contextlib
import os
import pathlib
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm import sandbox
from jaxrl_llm.rewards import combine, make
from jaxrl_llm.rewards.code import COMPILE, LATE, PASS, RUNTIME, TIMEOUT, WRONG, run_test

SECONDS = 2.0  # deadline of an attack
OUTCOMES = {PASS: "passed the test", WRONG: "wrong", RUNTIME: "failed", TIMEOUT: "killed at its deadline",
            COMPILE: "no Python", LATE: "late"}
_LIBC = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
"""
_FIND = """
def search(data):
    i = data.find(b"answer-is-")
    if i >= 0:
        print(data[i + 10:i + 42].decode())
        raise SystemExit
"""
_WRITE = """
import os
def f():
    for fd in range(3, 20):
        try:
            os.write(fd, value)
        except OSError:
            pass
    os._exit(0)
"""


class Attack(NamedTuple):
    """A program, in which PARENT, PORT, FOLDER and MARK are defined. `function`: it is called, and its value compared.

    `processes`: how many it may start in modes that allow more than one.
    """

    name: str
    program: str
    function: str | None = None
    processes: int = 1


ATTACKS = (
    Attack("the output becomes a pipe without a reader", """
import os
os.path.exists('output') and os.unlink('output')
os.mkfifo('output')
"""),
    Attack("the result becomes a pipe without a reader", """
import os
def f():
    os.mkfifo('result.json')
    os._exit(0)
""", "f"),
    Attack("the output becomes an endless device", """
import os
os.path.exists('output') and os.unlink('output')
os.symlink('/dev/zero', 'output')
"""),
    Attack("the output becomes the file with the answer", """
import os
os.path.exists('output') and os.unlink('output')
os.symlink(FOLDER + '/data.jsonl', 'output')
"""),
    Attack("1,200 nested folders", """
import os
for _ in range(1200):
    os.mkdir('d')
    os.chdir('d')
"""),
    Attack("a file that cannot be removed", """
import fcntl
with open('kept', 'w') as f:
    fcntl.ioctl(f, 0x40086602, (0x10).to_bytes(8, 'little'))
"""),
    Attack("reads the data file", _FIND + """
search(open(FOLDER + '/data.jsonl', 'rb').read())
"""),
    Attack("reads every file of the machine", _FIND + """
import os
for place, folders, files in os.walk('/'):
    folders[:] = [f for f in folders if f not in ('usr', 'lib', 'sys', 'python3.11', 'site-packages')]
    for name in files:
        try:
            search(open(os.path.join(place, name), 'rb').read(1 << 20))
        except (OSError, MemoryError):
            pass
"""),
    Attack("reads the environment and command line of all processes", _FIND + """
import glob
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        search(open(path, 'rb').read())
    except OSError:
        pass
"""),
    Attack("scans the memory of the parent", _FIND + """
with open('/proc/%d/mem' % PARENT, 'rb') as memory:
    for line in open('/proc/%d/maps' % PARENT):
        begin, end = (int(x, 16) for x in line.split()[0].split('-'))
        if 'rw' in line and end - begin < 1 << 27:
            memory.seek(begin)
            search(memory.read(end - begin))
"""),
    Attack("copies the memory of the parent (process_vm_readv)", _LIBC + """
buffer = ctypes.create_string_buffer(64)
pair = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
assert libc.process_vm_readv(PARENT, pair, 1, pair, 1, 0) < 0 and ctypes.get_errno() in (1, 3, 38)
"""),
    Attack("looks for the answer in its own interpreter", """
import gc, sys
for thing in gc.get_objects():
    if isinstance(thing, dict) and 'result' in thing and 'output' in thing:
        print(thing['output'])
frame = sys._getframe()
while frame:
    for key in ('expected', 'result', 'output'):
        if key in frame.f_locals.get('job', {}):
            print(frame.f_locals['job'][key])
    frame = frame.f_back
"""),
    Attack("connects to a server of this machine", """
import socket
with socket.create_connection(('127.0.0.1', PORT), 2) as s:
    print(s.recv(99).decode())
"""),
    Attack("signals the parent", """
import os, signal
os.kill(PARENT, signal.SIGURG)
for pid in range(2, 5000):
    try:
        os.kill(pid, 0)
        assert pid == os.getpid(), 'sees %d' % pid
    except OSError:
        pass
"""),
    Attack("kills everything it may", """
import os, signal
os.kill(-1, signal.SIGKILL)
"""),
    Attack("a child in a session of its own goes on", _LIBC + """
libc.prctl(15, MARK, 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(64):
            try:
                os.close(fd)
            except OSError:
                pass
        time.sleep(60)
    os._exit(0)
""", processes=64),
    Attack("40 forks", _LIBC + """
libc.prctl(15, MARK, 0, 0, 0)
for _ in range(40):
    if os.fork() == 0:
        time.sleep(60)
time.sleep(60)
""", processes=64),
    Attack("forks without end", _LIBC + """
libc.prctl(15, MARK, 0, 0, 0)
while True:
    try:
        os.fork()
    except OSError:
        pass
""", processes=64),
    Attack("threads without end", """
import threading, time
threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""),
    Attack("closes everything and sleeps", _LIBC + """
libc.prctl(15, MARK, 0, 0, 0)
os.closerange(0, 64)
time.sleep(60)
"""),
    Attack("ignores all signals", _LIBC + """
import signal
libc.prctl(15, MARK, 0, 0, 0)
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
"""),
    Attack("output without end", """
import sys
while True:
    sys.stdout.write('x' * 65536)
"""),
    Attack("errors without end", """
import sys
while True:
    sys.stderr.write('x' * 65536)
"""),
    Attack("a value without end", """
import os
block = b'[' * 65536
while True:
    for fd in range(3, 20):
        try:
            os.write(fd, block)
        except BlockingIOError:
            pass
        except OSError:
            pass
"""),
    Attack("a value nested a million times", "value = b'[' * 1000000" + _WRITE, "f"),
    Attack("an integer of a million digits", "value = b'1' * 1000000" + _WRITE, "f"),
    Attack("memory without end", """
import mmap
kept = []
while True:
    kept.append(mmap.mmap(-1, 1 << 26))
    kept[-1].write(b'x' * (1 << 26))
"""),
    Attack("memory in files without a name", """
import os
for i in range(60):
    fd = os.memfd_create('x')
    os.write(fd, b'x' * (1 << 25))
"""),
    Attack("fills the disk", """
import itertools
for i in itertools.count():
    with open('f%d' % i, 'wb') as file:
        file.write(b'x' * (1 << 24))
"""),
    Attack("files without end", """
import itertools
for i in itertools.count():
    open('f%d' % i, 'wb').close()
"""),
    Attack("writes into the installed packages", """
import os, sys
for place in sys.path:
    if os.path.isdir(place):
        open(place + '/' + MARK.decode(), 'w').close()
        print('wrote into', place)
"""),
    Attack("becomes root", """
import os
os.setuid(0)
os.setgid(0)
"""),
    Attack("makes namespaces of its own", _LIBC + """
assert libc.unshare(0x10000000) == 0
"""),
    Attack("mounts over what it sees", _LIBC + """
assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0
"""),
    Attack("hands in a value of its own", """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b'"guess"')
    except OSError:
        pass
os._exit(0)
"""),
)


class AttackResult(NamedTuple):
    """`outcome` of `rewards.code`; `held`: the test was not passed, in time, and nothing is left (else `why` not)."""

    attack: Attack
    outcome: int
    seconds: float
    why: str

    @property
    def held(self) -> bool:
        return not self.why

    def __str__(self) -> str:
        verdict = "held" if self.held else f"NOT HELD: {self.why}"
        return f"{self.attack.name:<58} {verdict} ({OUTCOMES[self.outcome]}, {self.seconds:.1f} s)"


@contextlib.contextmanager
def target() -> Iterator[tuple[str, dict]]:
    """An answer, and its places outside the sandbox: a data file, a server, this process's memory and environment."""
    answer = secrets.token_hex(16)
    known = f"answer-is-{answer}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o755)
        data = pathlib.Path(folder) / "data.jsonl"
        data.write_text(known)
        data.chmod(0o644)
        os.environ["JAXRL_LLM_ATTACK"] = known
        try:
            yield answer, {"PARENT": os.getpid(), "PORT": server.getsockname()[1], "FOLDER": folder,
                           "MARK": f"atk{secrets.token_hex(4)}".encode()}
        finally:
            del os.environ["JAXRL_LLM_ATTACK"]


def left_behind(mark: bytes) -> list[int]:
    """Processes that have given themselves that name."""
    pids = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_bytes().strip() == mark:
                pids.append(int(process.name))
    return pids


def attempt(attack: Attack, mode: str) -> AttackResult:
    """One attack in one mode of the sandbox."""
    with target() as (answer, known):
        program = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + attack.program
        test = {"output": answer} if attack.function is None else {"function": attack.function, "args": [], "result": answer}
        begun = time.monotonic()
        limits = sandbox.ResourceLimits(seconds=SECONDS, memory_mb=512, scratch_mb=32,
                                        processes=attack.processes if mode in sandbox.NAMESPACES else 1)
        outcome = run_test(program, test, limits, mode)
        seconds = time.monotonic() - begun
        problems = ["it passed the test"] * (outcome == PASS) + ["it took too long"] * (seconds > 2 * SECONDS + 5)
        left = left_behind(known["MARK"])
        return AttackResult(attack, outcome, seconds, "; ".join(problems + [f"processes are left: {left}"] * bool(left)))


# (description, reward and its options, completion, answer, the correct score)
ON_VERIFIERS = (
    ("a pattern that backtracks without end", ("format", {"pattern": "(a+)+b"}), "a" * 40, "", 0.0),
    ("a pattern of several stars on a long text", ("format", {"pattern": "<think>.*</think>.*<answer>.*</answer>.*"}),
     "<think></think><answer>" * 4000, "", 0.0),
    ("the question as the answer", ("boxed", {}), r"\boxed{123+456}", "579", 0.0),
    ("an integral as the answer", ("boxed", {}), r"\boxed{\int_0^3 x^2 dx}", "9", 0.0),
    ("a list that holds the answer twice", ("boxed", {}), r"\boxed{[5,5]}", "5", 0.0),
    ("a tower of powers", ("boxed", {}), r"\boxed{9^{9^{9^{9}}}}", "x+1", 0.0),
    ("a million braces", ("boxed", {}), r"\boxed{" * 10**6, "1", 0.0),
    ("a number of a million digits", ("last_number", {}), "1" * 10**6, "1", 0.0),
    ("digits, commas and minus signs without end", ("last_number", {}), "-1,1" * 10**5, "7", 0.0),
    ("a fraction with spaces without end", ("last_number", {}), r"\frac1" + " " * 10**5 + "x", "7", 0.0),
)


def report() -> bool:
    """Prints attack -> outcome for every verifier and every mode that runs programs here; returns whether all held."""
    held = True
    print("verifiers")
    for name, (reward, options), completion, answer, right in ON_VERIFIERS:
        begun = time.monotonic()
        score = combine([(make(reward, **options), 1.0)], on_error="zero", deadline=60.0)([completion], [answer]).total[0]
        seconds = time.monotonic() - begun
        good = score == right and seconds < 30
        held &= good
        print(f"  {name:<58} {'held' if good else 'NOT HELD'} (score {score:g}, {seconds:.1f} s)", flush=True)
    for probe in sandbox.probes():
        print(f"programs in mode {probe}", flush=True)
        if probe.missing:
            continue
        for attack in ATTACKS:
            result = attempt(attack, probe.mode)
            held &= result.held
            print(f"  {result}", flush=True)
    print("every attack was held off" if held else "the lines with NOT HELD name attacks that succeeded")
    return held
