"""How a program is confined: by bubblewrap, by `unshare` and our own mounts, by Landlock, or by resource limits alone."""
import functools
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
NAMESPACES = ("bubblewrap", "unshare")  # modes in which a program sees only its own processes, and all of them end with it
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives",
           "/etc/localtime")
_FIRST_USER, _USERS = 1_900_000_000, 4096  # ids of no account, so that concurrent programs share no limit of processes
_THREADS = 64
_SOURCE = pathlib.Path(inside.__file__).read_text()
_numbers = itertools.cycle(range(_USERS))


class ResourceLimits(NamedTuple):
    """The resource limits of one program.

    `seconds` of wall clock from its start; `memory_mb` of address space a process; `output_bytes` of each stream;
    `scratch_mb` in its own empty folder, which is also the largest file; `processes`, itself included.
    """

    seconds: float = 5.0
    memory_mb: int = 1024
    output_bytes: int = 4 << 20
    scratch_mb: int = 64
    processes: int = 1


def interpreter() -> str:
    """The Python that a virtual environment is made of, with links resolved."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def visible() -> list[str]:
    """The paths that a program can read: the system's programs and libraries, the interpreter, its installed packages.

    Of an interpreter's prefix, only its own folders are visible: an environment may have been made in a folder of data.
    """
    prefixes, parts = (sys.base_prefix, sys.prefix), ("bin", "lib", "lib64", "share")
    own = {os.path.join(prefix, part) for prefix in prefixes for part in parts} | set(site.getsitepackages())
    paths = [path for path in _SYSTEM if os.path.lexists(path)]
    for path in sorted(map(os.path.realpath, own), key=len):  # a folder before what lies in it
        if os.path.isdir(path) and not any(os.path.commonpath([path, other]) == other for other in paths):
            paths.append(path)
    return paths


def command(mode: str, descriptors: tuple[int, int, int]) -> list[str]:
    """The command line that starts `inside` confined by a mode, with the descriptors of its job, report and lifeline."""
    python = [interpreter(), "-I", "-S", "-B", "-c", _SOURCE, *map(str, descriptors)]
    root = os.geteuid() == 0
    if mode == "unshare":
        user = [] if root else ["--user", "--map-root-user"]
        namespaces = ["--mount", "--pid", "--net", "--ipc", "--uts"]
        return [shutil.which("unshare") or "unshare", *user, *namespaces, "--fork", "--kill-child=KILL", "--", *python]
    if mode == "bubblewrap":
        return [shutil.which("bwrap") or "bwrap", *_bubblewrap(root), "--", *python]
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


def _covered() -> str:
    """A folder of the machine that contains nothing that a program can read."""
    return next(path for path in ("/mnt", "/media", "/srv", "/tmp", "/home", "/opt", "/var")
                if os.path.isdir(path) and not any(other.startswith(path + "/") for other in visible()))


def settings(mode: str, limits: ResourceLimits) -> dict:
    """The part of a job that tells `inside` how to confine itself."""
    namespaces = mode in NAMESPACES
    own_user = os.geteuid() == 0 and _first_user() is not None and (namespaces or _read_by_others(interpreter()))
    tasks = limits.processes + _THREADS
    return {"new_root": _covered() if mode == "unshare" else "", "scratch": namespaces, "landlock": mode == "landlock",
            "visible": visible(), "devices": list(DEVICES), "user": _first_user() + next(_numbers) if own_user else None,
            "tasks": tasks if namespaces or own_user else tasks + 8 * _THREADS + _tasks_of_user()}


@functools.cache
def _first_user() -> int | None:
    """The first of `_USERS` user ids for programs, if possible ids that no account has; None if there are too few."""
    with open("/proc/self/uid_map") as table:
        ranges = [(int(first), int(first) + int(count)) for first, _, count in map(str.split, table)]
    if any(first <= _FIRST_USER and _FIRST_USER + _USERS <= end for first, end in ranges):
        return _FIRST_USER
    first, end = max(ranges, key=lambda pair: pair[1] - pair[0])
    return end - _USERS if end - first > 2 * _USERS else None


def available(mode: str) -> bool:
    """Whether the program that a mode starts is installed; `probe` finds out whether it works here."""
    needed = {"bubblewrap": "bwrap", "unshare": "unshare"}.get(mode)
    return needed is None or shutil.which(needed) is not None


def _read_by_others(path: str) -> bool:
    """Whether a user without rights reaches the file."""
    return all(parent.stat().st_mode & 0o001 for parent in pathlib.Path(path).parents)


def _tasks_of_user() -> int:
    """Number of threads of all processes of this user, which a limit of processes counts too."""
    count = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            count += sum(1 for _ in (process / "task").iterdir()) if process.stat().st_uid == os.geteuid() else 0
        except OSError:  # it has ended
            continue
    return count
