"""Which barriers hold on this machine: a hostile program runs in every mode, and what it reaches is recorded."""
import functools
import json
import os
import pathlib
import socket
import sys
import tempfile
from typing import NamedTuple

from jaxrl_llm.sandbox import modes, process
from jaxrl_llm.sandbox.modes import ResourceLimits

BARRIERS = {
    "files": "reads no file but the system's, the interpreter's and its packages'",
    "writes": "changes no file and makes none outside its scratch folder",
    "network": "opens no connection, not even to this machine",
    "processes": "neither sees nor signals any other process",
    "children": "starts no process that outlives it",
    "user": "runs without an administrator's rights",
    "kernel": "calls only what a program that computes needs: makes no namespace, mounts and traces nothing",
    "memory": "gets no more memory than its limit",
}
# Tries every way out and prints what it reached, as JSON.
INTRUDER = """
import ctypes, json, os, socket
reached, user = {}, os.getuid()
def attempt(barrier, action):
    try:
        action()
        reached[barrier] = True
    except (OSError, MemoryError):
        reached.setdefault(barrier, False)
def open_socket():
    socket.create_connection(("127.0.0.1", PORT), 1).close()
def use_libc(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(name)
def send_to_file():
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b"reached", FOLDER + "/socket")
def write_and_remove(path):
    open(path, "w").close()
    os.unlink(path)
def fork():
    if os.fork() == 0:
        os._exit(0)
attempt("files", lambda: open(FOLDER + "/hidden").read())
attempt("files", lambda: os.listdir(FOLDER))
attempt("files", lambda: open("/etc/passwd").read())
attempt("writes", lambda: write_and_remove(FOLDER + "/new"))
attempt("writes", lambda: os.unlink(FOLDER + "/hidden"))
attempt("writes", lambda: os.chmod(FOLDER + "/hidden", 0o777))
attempt("writes", lambda: write_and_remove(PREFIX + "/new"))
attempt("network", open_socket)
attempt("network", send_to_file)
attempt("processes", lambda: os.kill(PARENT, 0))
attempt("processes", lambda: open("/proc/%d/cmdline" % PARENT).read())
attempt("children", fork)
attempt("kernel", lambda: use_libc("unshare", 0x10000000))
attempt("kernel", lambda: use_libc("personality", 0xffffffff))
attempt("memory", lambda: bytearray(1 << 30))
print(json.dumps([reached, user]))
"""


class BarrierReport(NamedTuple):
    """The barriers of one mode: `holds` are names of `BARRIERS`; `problem` says why the mode does not work at all, else ""."""

    mode: str
    holds: frozenset[str]
    problem: str = ""

    @property
    def missing(self) -> list[str]:
        return [barrier for barrier in BARRIERS if barrier not in self.holds]

    def __str__(self) -> str:
        if self.problem:
            return f"{self.mode}: does not work here ({self.problem})"
        return f"{self.mode}: " + (f"without {', '.join(self.missing)}" if self.missing else "all barriers hold")


@functools.cache
def probe(mode: str) -> BarrierReport:
    """Tests one mode on this machine; takes about a tenth of a second, once per process."""
    if not sys.platform.startswith("linux"):
        return BarrierReport(mode, frozenset(), "programs run on Linux only")
    if not modes.available(mode):
        return BarrierReport(mode, frozenset(), "not installed")
    with (tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server,
          socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams):
        os.chmod(folder, 0o777)
        hidden = pathlib.Path(folder) / "hidden"
        hidden.write_text("hidden")
        hidden.chmod(0o666)
        datagrams.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        known = {"FOLDER": folder, "PORT": server.getsockname()[1], "PARENT": os.getpid(), "PREFIX": sys.prefix}
        program = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + INTRUDER
        try:
            finished = process.run(program, limits=ResourceLimits(seconds=20.0, memory_mb=512), mode=mode)
            reached, user = json.loads(finished.stdout)
        except process.SandboxError as error:
            return BarrierReport(mode, frozenset(), str(error))
        except ValueError:
            why = finished.stderr[-300:].decode(errors="replace").strip()
            return BarrierReport(mode, frozenset(), f"a program cannot run: {why}")
    reached["user"] = os.geteuid() == 0 and user == 0
    return BarrierReport(mode, frozenset(BARRIERS) - {barrier for barrier, through in reached.items() if through})


def probes() -> list[BarrierReport]:
    """The probes of all modes, the strongest first."""
    return [probe(mode) for mode in modes.MODES]


@functools.cache
def best() -> BarrierReport:
    """The first mode in which every barrier holds, else the one in which most do."""
    tried = []
    for mode in modes.MODES:
        tried.append(probe(mode))
        if not tried[-1].missing:
            break
    return max(tried, key=lambda one: len(one.holds))


def require(unsafe: bool = False) -> BarrierReport:
    """The mode to run programs in. Raises SandboxError if a barrier is missing, unless `unsafe`."""
    chosen = best()
    if chosen.problem or (chosen.missing and not unsafe):
        tried = "; ".join(map(str, probes()))
        lacking = ", ".join(f"{name} ({BARRIERS[name]})" for name in chosen.missing)
        raise process.SandboxError(
            f"programs are not run on this machine, where these barriers do not hold: {lacking}. Tried: {tried}. Install "
            "bubblewrap (Debian, Ubuntu: apt-get install bubblewrap), allow user namespaces, or use a container that does; "
            "unsafe=True runs them with the barriers that hold")
    return chosen
