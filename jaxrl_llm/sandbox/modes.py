"""How a program is shut in: by bubblewrap, by `unshare` and mounts of our own, by Landlock, or by resource limits alone."""
import itertools
import os
import pathlib
import shutil
import site
import sys
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm.sandbox import inside

MODES = ("bubblewrap", "unshare", "landlock", "limits")  # the strongest first
NAMESPACES = ("bubblewrap", "unshare")  # those in which a program sees no process but its own, and ends with all of them
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives",
           "/etc/localtime")
_FIRST_USER, _USERS = 1_900_000_000, 4096  # ids that nobody has: what runs at the same time shares no limit of processes
_THREADS = 64
_SOURCE = pathlib.Path(inside.__file__).read_text()
_user_ids = itertools.cycle(range(_FIRST_USER, _FIRST_USER + _USERS))


class Limits(NamedTuple):
    """What one program may use.

    `seconds` of wall clock from its start; `memory_mb` of address space a process; `output_bytes` of each stream;
    `scratch_mb` in its own empty folder, which is also the largest file; `processes`, itself included.
    """

    seconds: float = 5.0
    memory_mb: int = 1024
    output_bytes: int = 4 << 20
    scratch_mb: int = 64
    processes: int = 1


def interpreter() -> str:
    """The Python that a virtual environment is made of, itself no link."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def visible() -> list[str]:
    """The paths that a program can read: the system's programs and libraries, the interpreter, its installed packages."""
    paths = [path for path in _SYSTEM if os.path.lexists(path)]
    for path in (sys.base_prefix, sys.prefix, *site.getsitepackages()):
        path = os.path.realpath(path)
        if os.path.isdir(path) and not any(os.path.commonpath([path, other]) == other for other in paths):
            paths.append(path)
    return paths


def command(mode: str, descriptors: tuple[int, int, int]) -> list[str]:
    """The command line that starts `inside` shut in by a mode, with the descriptors of its job, report and lifeline."""
    python = [interpreter(), "-I", "-S", "-B", "-c", _SOURCE, *map(str, descriptors)]
    root = os.geteuid() == 0
    if mode == "unshare":
        user = [] if root else ["--user", "--map-root-user"]
        return ["unshare", *user, "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL", "--", *python]
    if mode == "bubblewrap":
        return ["bwrap", *_bubblewrap(root), "--", *python]
    return python


def _bubblewrap(root: bool) -> Iterator[str]:
    yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session")
    if not root:
        yield from ("--unshare-user", "--cap-add", "CAP_SYS_ADMIN")  # for the mount of the scratch folder; dropped after it
    parents = {str(parent) for path in visible() for parent in pathlib.Path(path).parents[:-1]}
    for path in sorted(parents):  # left to itself, bubblewrap makes those that others may not enter
        yield from ("--perms", "0755", "--dir", path)
    for path in visible():
        yield from ("--symlink", os.readlink(path), path) if os.path.islink(path) else ("--ro-bind", path, path)
    for path in DEVICES:
        yield from ("--dev-bind", path, path)
    yield from ("--dir", inside.SCRATCH, "--remount-ro", "/")


def settings(mode: str, limits: Limits) -> dict:
    """The part of a job that tells `inside` how to confine itself."""
    namespaces = mode in NAMESPACES
    own_user = os.geteuid() == 0 and (namespaces or _read_by_others(interpreter()))
    tasks = limits.processes + _THREADS
    return {"new_root": mode == "unshare", "scratch": namespaces, "landlock": mode == "landlock", "visible": visible(),
            "devices": list(DEVICES), "user": next(_user_ids) if own_user else None,
            "tasks": tasks if namespaces or own_user else tasks + _tasks_of_user()}


def available(mode: str) -> bool:
    """Whether the program that a mode starts is installed; whether it works here is what `probe` finds out."""
    needed = {"bubblewrap": "bwrap", "unshare": "unshare"}.get(mode)
    return needed is None or shutil.which(needed) is not None


def _read_by_others(path: str) -> bool:
    """Whether a user without rights reaches the file."""
    return all(parent.stat().st_mode & 0o001 for parent in pathlib.Path(path).parents)


def _tasks_of_user() -> int:
    """Threads of all processes of this user, which a limit of processes counts too."""
    count = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            count += sum(1 for _ in (process / "task").iterdir()) if process.stat().st_uid == os.geteuid() else 0
        except OSError:  # it has ended
            continue
    return count
