"""The inside of a sandbox, from trusted set-up to the untrusted program. Sent as text to a bare interpreter.

`python -I -S -B -c SOURCE JOB_FD REPORT_FD LIFELINE_FD`: the job is JSON in a nameless file. Everything that can fail is
done before "ready" is written to the report; a byte from the lifeline then starts the program, whose own output follows. Only
the standard library is used: the project is not visible here.
"""
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys

COMPILE_ERROR = 90  # exit code
SCRATCH = "/scratch"  # not /tmp, below which an environment may have been made
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MNT_DETACH = 2, 4, 4096, 16384, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 22, 24, 38, 9
# The numbers of these calls are the same on all machines, or are listed by machine (pivot_root, capset).
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_PIVOT_ROOT, _CAPSET = {"x86_64": (155, 126), "aarch64": (41, 91)}.get(os.uname().machine, (None, None))
_READ_ONLY, _AT_RECURSIVE = 1 | 2 | 4, 0x8000  # read only, no set-user-ID, no devices
_FILE_ACCESS_BY_VERSION = (0, 13, 14, 15, 15, 16)  # Landlock: how many kinds of file access each version rules
_READ_FILES, _DEVICE = 0b1101, 0b110  # execute, read file, read directory; read and write a file
# What LiveCodeBench and APPS import before a program runs; of a name that several have, the last counts.
USUAL_MODULES = ("string", "re", "datetime", "time", "collections", "heapq", "bisect", "copy", "fractions", "math", "random",
                 "statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing")
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def must(result: int, what: str) -> int:
    """The result of a C call; OSError if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    must(libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount {source} on {target}")


def new_root(root: str, visible: list[str], devices: list[str]) -> None:
    """Replaces the file system by one that holds the `visible` paths, read only, a few devices and an empty scratch folder.

    It is assembled at `root`, an existing folder whose contents are hidden in this mount namespace only.
    """
    mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.mkdir(root + SCRATCH)
    for path in visible + devices:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        os.mkdir(target) if os.path.isdir(path) else os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(path, target, None, _MS_BIND | _MS_REC)
        if path not in devices:
            read_only(target, _AT_RECURSIVE)
    os.chdir(root)
    must(libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    must(libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")
    read_only("/", 0)


def read_only(path: str, flags: int) -> None:
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", _READ_ONLY if flags else 1, 0, 0, 0))
    must(libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.c_size_t(32)), f"read-only {path}")


def first_process(lifeline: int) -> None:
    """Returns in a child; the caller, process 1 of its namespace, ends with that child, or when the parent outside is gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel then does not deliver it to a first process
    child = os.fork()
    if not child:
        return
    watched, poll = os.pidfd_open(child), select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(lifeline, 0)  # the closing of its other end is reported nevertheless
    if lifeline in dict(poll.poll()):
        os._exit(1)
    ended = os.waitid(os.P_PIDFD, watched, os.WEXITED)
    os._exit(ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status)


def limit(job: dict) -> None:
    """CPU seconds, address space, bytes of a file, open files, processes and threads; no core dumps."""
    bounds = {resource.RLIMIT_CPU: job["cpu_seconds"], resource.RLIMIT_AS: job["memory_mb"] << 20,
              resource.RLIMIT_FSIZE: job["scratch_mb"] << 20, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0,
              resource.RLIMIT_NPROC: job["tasks"]}
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def drop_privileges(user: int | None) -> None:
    """Drops all capabilities, now and for whatever is executed; as root also changes to the user, if one is given."""
    last = 0
    while os.geteuid() == 0 and libc.prctl(_PR_CAPBSET_DROP, last, 0, 0, 0) == 0:
        last += 1
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    must(libc.syscall(_CAPSET, header, none), "capset")
    must(libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl")  # a change of user has cleared it
    must(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def landlock(visible: list[str], devices: list[str]) -> None:
    """Forbids all files but the `visible` ones, which can be read, and the devices; TCP; signals to other processes."""
    version = must(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    if version < 3:
        raise OSError(f"Landlock has version {version}; version 3 (Linux 6.2) is the first that keeps files from being emptied")
    files = (1 << _FILE_ACCESS_BY_VERSION[min(version, 5)]) - 1
    rules = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = must(libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0), "Landlock rules")
    for path in visible + devices:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        access = _DEVICE if path in devices else _READ_FILES if os.path.isdir(path) else _READ_FILES & 0b101
        must(libc.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, place), 0), f"Landlock rule of {path}")
        os.close(place)
    must(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "Landlock")
    os.close(ruleset)


def forbid_calls(program: bytes) -> None:
    """Loads a seccomp filter, for this thread and all it starts; it cannot be taken back."""
    instructions = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions)))
    must(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(described), 0, 0), "seccomp")


def confine(job: dict, lifeline: int) -> None:
    """All set-up between the interpreter's start and the program, ordered so that each step still has the rights it needs."""
    if job["new_root"]:
        new_root(job["new_root"], job["visible"], job["devices"])
        first_process(lifeline)
    if job["scratch"]:
        mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={job['scratch_mb']}m,nr_inodes=4096,mode=1777")
        os.chdir(SCRATCH)
    limit(job)
    drop_privileges(job["user"])
    if job["landlock"]:
        landlock(job["visible"], job["devices"])
    if job["filter"]:
        forbid_calls(bytes.fromhex(job["filter"]))


def called(names: dict, function: str):
    """The function of a program, or else the method of its class `Solution`, as sites of exercises ask for one."""
    return names[function] if function in names else getattr(names["Solution"](), function)


def undefined(program: str) -> set[str]:
    """The names that a program reads and that neither it nor Python defines; none where it is nested too deep to be read."""
    import builtins
    import symtable

    try:
        tables, read = [symtable.symtable(program, "<program>", "exec")], set()
        defined = set(dir(builtins))
        for table in tables:
            for symbol in table.get_symbols():
                if symbol.is_global() or table is tables[0]:
                    made = symbol.is_assigned() or symbol.is_imported()
                    (defined if made else read).add(symbol.get_name())
            tables.extend(table.get_children())
    except (SyntaxError, RecursionError):
        return set()
    return read - defined


def usual_names(wanted: set[str]) -> dict:
    """Those of the names that the usual modules have: a module itself, or what an import of all its names gives."""
    import importlib

    found: dict = {}
    for name in USUAL_MODULES if wanted else ():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [one for one in vars(module) if not one.startswith("_")]
        found |= {one: getattr(module, one) for one in wanted.intersection(public)}
    return found | {name: importlib.import_module(name) for name in wanted.intersection(USUAL_MODULES)}


def as_harness(program: str) -> dict:
    """What the harnesses of contests' data give to a program: imports, deep recursion, long integers, `open("/dev/stdin")`."""
    import builtins
    import io

    sys.setrecursionlimit(50_000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    actual = io.open

    def open(file, *args, **options):
        return actual(os.dup(0) if file == "/dev/stdin" else file, *args, **options)

    builtins.open = io.open = open
    return usual_names(undefined(program))


def values(args: list | str) -> list:
    """The arguments of a call: JSON values, or the text of a list of Python literals, such as tuples."""
    import ast

    return ast.literal_eval(args) if isinstance(args, str) else args


def main(job_fd: int, report_fd: int, lifeline: int) -> None:
    """Confines this process, then runs the program of the job; the value of a named function follows as JSON."""
    with open(job_fd) as file:
        job = json.load(file)
    import site  # noqa: F401  exit() and quit(), which programs use; nothing is read from folders of packages
    site.setquit()
    sys.path += job["packages"]
    report = os.fdopen(report_fd, "w")
    try:
        confine(job, lifeline)
    except Exception as error:
        report.write(f"{type(error).__name__}: {error}")
        report.flush()
        os._exit(1)
    report.write("ready\n")
    report.flush()
    if not os.read(lifeline, 1):
        os._exit(1)
    os.close(lifeline)
    try:
        compiled = compile(job["program"], "<program>", "exec")
    except (SyntaxError, ValueError):
        sys.exit(COMPILE_ERROR)
    names: dict = {"__name__": "__main__"} | (as_harness(job["program"]) if job["harness"] else {})
    exec(compiled, names)
    if job["function"]:
        json.dump(called(names, job["function"])(*values(job["args"])), report)
        report.flush()


if __name__ == "__main__":
    sys.argv, arguments = ["program"], [int(text) for text in sys.argv[1:]]
    main(*arguments)
