"""Programs that try to get out of the sandbox, stop the run, or leave something behind."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from jaxrl_llm import rewards, sandbox
from jaxrl_llm.audits import program_attacks
from jaxrl_llm.rewards import RewardError, combine
from jaxrl_llm.rewards.code import extract_program, same_output, same_value
from jaxrl_llm.sandbox import barriers, modes, syscalls
from jaxrl_llm.sandbox import process as one_program
from jaxrl_llm.tasks import Problem

AS_USER = [sys.executable, str(pathlib.Path(__file__).with_name("as_user.py"))]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
ECHO = {"input": "7", "output": "7"}


def working(mode):
    actual = sandbox.probe(mode)
    if actual.missing:
        pytest.skip(str(actual))
    return mode


def installed(mode):
    if not modes.available(mode):
        pytest.skip(f"{mode} is not installed")
    return mode


def user_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1"}


def sleeping(processes):
    """A program of this many processes that sleep for a minute, and their common name."""
    mark = f"slp{secrets.token_hex(4)}".encode()
    return f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {mark!r}, 0, 0, 0)
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # to live on without its parent
for _ in range({processes - 1}):
    if os.fork() == 0:
        os.setsid()
        break
time.sleep(60)
""", mark


def gone(mark, seconds=5.0):
    end = time.monotonic() + seconds
    while program_attacks.left_behind(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def appeared(mark, count, seconds=20.0):
    end = time.monotonic() + seconds
    while len(program_attacks.left_behind(mark)) < count:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.slow
def test_the_probes_intruder_gets_through_where_nothing_stops_it(tmp_path):
    (tmp_path / "hidden").write_text("hidden")
    with socket.create_server(("127.0.0.1", 0)) as server:
        datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagrams.bind(str(tmp_path / "socket"))
        known = {"FOLDER": str(tmp_path), "PORT": server.getsockname()[1], "PARENT": os.getpid(), "PREFIX": str(tmp_path)}
        program = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + barriers.INTRUDER
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    reached, user = json.loads(ran.stdout)
    assert user == os.getuid() and set(reached) == set(sandbox.BARRIERS) - {"user"}
    assert all(reached.values()), reached


@pytest.mark.slow
@pytest.mark.parametrize("mode", sandbox.MODES[:3])
def test_every_attack_is_held(mode):
    results = [program_attacks.attempt(attack, working(mode)) for attack in program_attacks.ATTACKS]
    assert [str(result) for result in results if not result.held] == []


@as_root
@pytest.mark.slow
def test_every_attack_is_held_for_a_user_without_rights():
    command = [*AS_USER, sys.executable, "-m", "jaxrl_llm.audits.verifiers", "--attacks"]
    ran = subprocess.run(command, env=user_environment(), capture_output=True, text=True)
    assert ran.returncode == 0 and "NOT HELD" not in ran.stdout, ran.stdout + ran.stderr
    assert len(re.findall(r" held \(", ran.stdout)) >= len(program_attacks.ATTACKS), ran.stdout


@pytest.mark.slow
@as_root
def test_a_machine_without_barriers_is_refused_unless_unsafe(tmp_path):
    # Nothing can make namespaces, and no other user can read the interpreter: programs would run as root.
    program = """
from jaxrl_llm import rewards, sandbox
from jaxrl_llm.tasks import Problem
problem = Problem("", "", 0, extra={"tests": [{"input": "7", "output": "7"}]})
completion = "```python\\nprint(input())\\n```"
missing = sandbox.best().missing
try:
    rewards.combine(["code"])([completion], [""], [problem])
    print("ran")
except rewards.RewardError as error:
    print(error)
reward = rewards.make("code", unsafe=True)
print(missing, rewards.combine([reward])([completion], [""], [problem]).total, reward.prepare())
"""
    (tmp_path / "env").symlink_to("/usr/bin/env")
    ran = subprocess.run([sys.executable, "-c", program], env={**user_environment(), "PATH": str(tmp_path)},
                         capture_output=True, text=True)
    if "ran\n" in ran.stdout:
        pytest.skip("Landlock alone holds all barriers here: " + ran.stdout)
    assert "these barriers do not hold: user (runs without an administrator's rights)" in ran.stdout, ran.stdout + ran.stderr
    assert "bubblewrap: does not work here (not installed)" in ran.stdout and "unsafe=True" in ran.stdout
    assert "['user'] [1.] sandbox landlock: without user" in ran.stdout


@pytest.mark.parametrize("mode", sandbox.MODES[:3])
def test_a_sandbox_ends_with_its_parent(mode):
    processes = 3 if mode in sandbox.NAMESPACES else 1
    program, mark = sleeping(processes)
    code = (f"from jaxrl_llm import sandbox\nsandbox.run({program!r}, mode={mode!r}, "
            f"limits=sandbox.ResourceLimits(seconds=60.0, processes={processes}))")
    if mode in sandbox.NAMESPACES:
        working(mode)
    parent = subprocess.Popen([sys.executable, "-c", code], env=user_environment())
    try:
        assert appeared(mark, processes)
    finally:
        parent.kill()
        parent.wait()
    assert gone(mark)


@pytest.mark.parametrize("mode", sandbox.MODES[:3])
def test_a_sandbox_ends_on_a_signal(mode):
    program, mark = sleeping(1)
    stop, end = os.pipe()
    os.close(end)  # from now on it can be read
    begun = time.monotonic()
    finished = sandbox.run(program, mode=installed(mode), limits=sandbox.ResourceLimits(seconds=60.0), stop=stop)
    os.close(stop)
    assert finished.status == "timeout" and time.monotonic() - begun < 20 and gone(mark)


# By number on x86-64, with arguments that do nothing.
REFUSED = {
    "SysV queue is read": (70, 0, 0, 0, 0, 0), "SysV queue is removed": (71, 0, 0, 0), "shared memory": (29, 0, 4096, 0o1000),
    "pages into a pipe": (278, 1, 0, 0, 0), "pipe to pipe": (276, 0, 1, 0, 0), "asynchronous input": (206, 1, 0),
    "watches of files": (294, 0), "timers": (222, 0, 0, 0), "sync": (162,), "attributes of files": (188, 0, 0, 0, 0, 0),
    "buffers of sockets": (54, 0, 1, 7, 0, 0), "connect": (42, 0, 0, 0), "own Landlock rules": (444, 0, 0, 1),
    "own filters": (317, 0, 0, 0), "death signal": (157, 1, 0, 0, 0, 0), "filter by prctl": (157, 22, 2, 0, 0, 0),
    "owner of signals": (72, 1, 8, 1), "lease": (72, 1, 1024, 0), "size of a pipe": (72, 1, 1031, 4096),
    "flags of a file": (16, 1, 0x40086602, 0), "datagrams between processes": (53, 1, 2, 0, 0), "memory file": (319, 0, 0),
    "tracing": (101, 0, 0, 0, 0), "keys": (250, 0, 0, 0, 0), "ring": (425, 1, 0), "mounts": (165, 0, 0, 0, 0, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
@pytest.mark.parametrize("mode", sandbox.MODES[:3])
def test_calls_that_no_computation_needs_are_refused(mode):
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, (number, *arguments) in {REFUSED!r}.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    if result != -1 or ctypes.get_errno() != 1:
        print(name, result, ctypes.get_errno())
import asyncio
asyncio.run(asyncio.sleep(0))  # what event loops need is still there
"""
    finished = sandbox.run(program, mode=installed(mode), limits=sandbox.ResourceLimits(seconds=30.0))
    assert (finished.code, finished.stdout, finished.stderr) == (0, b"", b"")


def test_data_beside_an_environment_is_not_seen(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (tmp_path / "data.jsonl").write_text("hidden")
    mode = sandbox.require().mode
    program = f"import os\nprint(os.path.exists({str(tmp_path / 'data.jsonl')!r}), sorted(os.listdir({str(tmp_path)!r})))"
    code = (f"from jaxrl_llm import sandbox\nimport sys; sys.prefix == {str(tmp_path)!r} or sys.exit('no environment')\n"
            f"print(sandbox.run({program!r}, mode={mode!r}, limits=sandbox.ResourceLimits(seconds=30.0)).stdout.decode())")
    ran = subprocess.run([str(tmp_path / "bin/python"), "-c", code], env=user_environment(), capture_output=True, text=True)
    assert ran.stdout.startswith("False ['bin', 'lib"), ran.stdout + ran.stderr


@pytest.mark.parametrize("mode", sandbox.MODES[:3])
def test_a_parent_without_standard_streams_runs_programs(mode):
    code = f"""
import os
from jaxrl_llm import sandbox
kept = os.dup(1)
os.closerange(0, 3)
finished = sandbox.run("print(7)", mode={installed(mode)!r}, limits=sandbox.ResourceLimits(seconds=30.0))
os.write(kept, finished.stdout)
"""
    ran = subprocess.run([sys.executable, "-c", code], env=user_environment(), capture_output=True)
    assert ran.stdout == b"7\n", ran.stderr


def test_lost_exit_codes_are_no_verdict():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(sandbox.SandboxError, match="SIGCHLD is ignored in this process, so exit codes are lost"):
            sandbox.run("1 / 0", mode="limits")
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_forty_programs_leave_no_descriptor():
    mode = sandbox.require().mode
    sandbox.run("", mode=mode)
    before = len(os.listdir("/proc/self/fd"))
    limits = sandbox.ResourceLimits(seconds=30.0)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: sandbox.run("print('x' * 10**7)", mode=mode, limits=limits), range(40)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_processes_need_a_namespace_that_ends_them():
    with pytest.raises(sandbox.SandboxError, match="processes=2 needs a process namespace"):
        sandbox.run("", mode="landlock", limits=sandbox.ResourceLimits(processes=2))


def test_a_program_has_its_packages_threads_and_scratch_folder():
    finished = sandbox.run("""
import threading
import numpy as np
found = []
thread = threading.Thread(target=lambda: found.append(int(np.arange(5).sum())))
thread.start()
thread.join()
open("note", "w").write("kept")
print(found, open("note").read(), input())
exit(3)
""", stdin="given", mode=sandbox.require().mode, limits=sandbox.ResourceLimits(seconds=30.0))
    assert finished == ("done", 3, b"[10] kept given\n", b"", b"")


@pytest.mark.slow
def test_looping_programs_end_with_the_batch_and_are_counted():
    """240 programs wait for two workers, which cannot end them one by one within the time of the batch."""
    loop, right = "```python\nwhile True: pass\n```", "```python\nprint(input())\n```"
    problem = Problem("", "", 0, extra={"tests": [ECHO] * 3})
    reward = combine([rewards.make("code", workers=2, deadline=1.0)], on_error="zero", deadline=3.0)
    begun = time.monotonic()
    scores = reward([right] + [loop] * 240, [""] * 241, [problem] * 241)
    assert time.monotonic() - begun < 20
    assert scores.total.tolist() == [1.0] + [0.0] * 240
    late = scores.failures["code/late"]
    assert late >= 200 and late + scores.failures.get("code/timeout", 0) == 240


def test_a_late_test_ends_its_answer():
    problem = Problem("", "", 0, extra={"tests": [ECHO] * 100})
    reward = combine([rewards.make("code", workers=1, deadline=0.5, partial_credit=0.5)])
    begun = time.monotonic()
    scores = reward(["```python\nwhile True: pass\n```"], [""], [problem])
    assert time.monotonic() - begun < 20 and scores.failures == {"code/timeout": 1}


def test_an_error_ends_the_rest_of_the_batch():
    loop, problem = "```python\nwhile True: pass\n```", Problem("", "", 0, extra={"tests": [ECHO]})
    begun = time.monotonic()
    with pytest.raises(RewardError, match="completion 0 .*needs problem.extra"):
        combine([rewards.make("code", workers=2, deadline=60.0)])([loop] * 20, [""] * 20, [Problem("", "", 0)] + [problem] * 19)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("1000001", "1000000", False), ("1_0", "10", False), ("10.0", "10", True), ("+007", "7", True), ("-0", "0", True),
    ("1e1", "10", False), ("10.5", "10", False), ("\u0661", "1", False), ("1 1000001", "1 1000000", False),
    ("0.333333", "0.3333331", True), ("0.34", "0.33", False), ("9" * 5000, "9" * 5000 + " ", True),
    ("9" * 5000, "9" * 4999, False), ("1e400", "1.5", False), ("infinity", "1.5", False),
    ("nan", "0.5", False), ("2", "2.00001", True),
])
def test_numbers_in_output(printed, expected, same):
    assert same_output(printed, expected) is same


def test_integers_in_values_are_exact():
    wrong = [(1000001, 1000000), (1000001.0, 1000000), ({"a": True}, {"a": 1}), ({"a": 1}, {"a": True}), ([1000001], [1000000]),
             (10**400, 1.5), ({"a": 1}, {"a": 1, "b": 2}), (1, [1]), ([1], 1), (True, 1.0)]
    right = [(2.0, 2), (1000001, 1000000.0), ({"a": [0.30000001]}, {"a": [0.3]}), (10**30, 10**30)]
    assert not any(same_value(*pair) for pair in wrong) and all(same_value(*pair) for pair in right)


@pytest.mark.parametrize("hostile", ["0" * 10**6 + "x", "1" * 10**6 + "x", "1." * 10**6, "+" * 10**6, "1 " * 10**6,
                                     "\n" * 10**6, "1e" * 10**6, ".0" * 10**6], ids=lambda text: repr(text[:4]))
def test_hostile_output_is_compared_in_linear_time(hostile):
    begun = time.monotonic()
    assert not same_output(hostile, "0 1.5") and not same_output(hostile, "17") and not same_output("x " + hostile, "x 1.5")
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("hostile", ["```python\n" * 10**5, "```python " * 10**5, "```python" + " " * 10**6, "`" * 10**6,
                                     "```python\n```" * 10**5, "```\n" * 10**5, " ```python\n```" * 10**5,
                                     " " * 10**6 + "```python\n" + "\n   " * 10**5 + "x"], ids=lambda text: repr(text[:14]))
def test_programs_are_found_in_linear_time(hostile):
    begun = time.monotonic()
    assert extract_program(hostile) in (None, "")
    assert time.monotonic() - begun < 10


@pytest.mark.skipif(not pathlib.Path("/usr/include/asm-generic/unistd.h").exists(), reason="no kernel headers")
def test_system_call_numbers_are_those_of_the_kernel():
    def numbers(path):
        text = pathlib.Path(path).read_text()
        return {actual[1]: int(actual[2]) for actual in re.finditer(r"#define\s+__NR(?:3264)?_(\w+)\s+(\d+)", text)}

    arm = numbers("/usr/include/asm-generic/unistd.h")
    listed = syscalls._NEVER | syscalls._WITHOUT_NAMESPACES | syscalls._FORK
    listed |= {name: rule[0] for name, rule in syscalls._WITH_VALUES.items()}
    listed |= {"clone": syscalls._CLONE, "clone3": syscalls._CLONE3, "prlimit64": syscalls._PRLIMIT}
    assert {name: pair[1] for name, pair in listed.items()} == {name: arm.get(name) for name in listed}
    header = pathlib.Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if header.exists():
        assert {name: pair[0] for name, pair in listed.items()} == {name: numbers(header)[name] for name in listed}


@as_root
def test_other_processes_of_the_user_cannot_read_this_one():
    program = """
import os
from jaxrl_llm.sandbox import process
os.environ["SECRET"] = "1"
def readable(pid):
    found = []
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                name == "mem" or file.read(1)
            found.append(name)
        except PermissionError:
            pass
    return found
def seen_by_a_child():
    parent, (reads, writes) = os.getpid(), os.pipe()
    if os.fork() == 0:
        os.write(writes, str(readable(parent)).encode())
        os._exit(0)
    os.wait()
    return os.read(reads, 100).decode()
print(seen_by_a_child())
process._hide_this_process()
print(seen_by_a_child())
"""
    ran = subprocess.run([*AS_USER, sys.executable, "-c", program], env=user_environment(), capture_output=True, text=True)
    assert ran.stdout == "['environ', 'mem', 'maps']\n[]\n", ran.stdout + ran.stderr


def test_signals_of_a_killed_program_are_no_success():
    finished = sandbox.run("import os, signal\nprint(7, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)",
                           mode=sandbox.require().mode, limits=sandbox.ResourceLimits(seconds=30.0))
    if sandbox.require().mode in sandbox.NAMESPACES:
        assert (finished.status, finished.code) == ("done", 128 + signal.SIGKILL)


def test_a_sandbox_that_is_killed_while_it_starts_leaves_no_process():
    """Its first child is forked before it is tied to its parent, at some moment of the first milliseconds."""
    mode, begun = installed("bubblewrap"), []
    for number in range(30):
        with contextlib.ExitStack() as stack:
            (_, report), (lifeline, _) = one_program._pipe(stack), one_program._pipe(stack)
            process = one_program._start(mode, (one_program._nameless("{}", stack), report, lifeline), subprocess.DEVNULL)
            end = time.monotonic() + number * 1.5e-4
            while time.monotonic() < end:
                pass
            one_program._end(process, [])
            process.wait()
            process.stdout.close()
            process.stderr.close()
            begun.append(process.pid)

    def living():
        for one in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(one.pid) in begun and one.info["status"] != psutil.STATUS_ZOMBIE:
                    yield one

    end = time.monotonic() + 20
    while (left := list(living())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
