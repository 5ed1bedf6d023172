"""One run at a time in a folder: a lock that the system releases when the process ends in any way."""
import contextlib
import datetime
import errno
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from jaxrl_llm import parallel
from jaxrl_llm.store import bucket
from jaxrl_llm.store.bucket import LOCK as FILE_NAME
from jaxrl_llm.store.bucket import AnyPath

PATIENCE = 60.0  # seconds for which some network file systems cache that a file does not exist
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of some NFS and FUSE mounts


class Held(NamedTuple):
    """The folder `path` of a run, the local `folder` of its records, and `write`, which puts these into a bucket.

    `weights`: the folder of its checkpoints. All are one folder, and `write` does nothing, if the run's is local.
    """

    path: AnyPath
    folder: Path
    weights: AnyPath
    write: Callable[[], None] = lambda: None


def at_home(folder: Path) -> Held:
    """A local folder, as one that is held."""
    return Held(folder, folder, folder)


@contextlib.contextmanager
def locked(path: str | os.PathLike) -> Iterator[Held]:
    """Locks the run folder `path`, which is created if needed, and removed again if it stays empty.

    Only the first of several processes locks, and writes what a bucket gets. Readers of the folder need no lock. Raises, in
    every process, RuntimeError if another live run has the folder, OSError if it cannot be written and ValueError if a process
    does not see it, or if several cannot write to this bucket.
    """
    home, problem, folder, write = bucket.place(path), None, None, lambda: None
    if bucket.is_bucket(home) and not bucket.native(home) and parallel.several():
        raise ValueError(f"workdir {home}: several processes write checkpoints to gs:// or to mounted storage, which orbax "
                         "knows, and to no other bucket; mount it on all hosts")
    with contextlib.ExitStack() as held:
        if parallel.is_primary():
            try:
                if isinstance(home, Path):
                    held.enter_context(_hold(home))
                folder, write = held.enter_context(bucket.kept(home, continued=True))
            except (RuntimeError, OSError, ValueError) as error:
                problem = error
        first = next(filter(None, parallel.gather_objects(problem)), None)
        if first is not None:
            raise first
        _check_seen(home)
        folder = bucket.local(home) if folder is None else folder
        yield Held(home, folder, home if bucket.native(home) else folder, write)


def is_locked(path: Path) -> bool:
    """Whether a live run has the folder, as far as its file system tells."""
    if not (path / FILE_NAME).exists():
        return False
    try:
        with FileLock(path / FILE_NAME, timeout=0.1, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:  # it cannot be locked
        return False


def _check_seen(path: AnyPath) -> None:
    """Raises ValueError in every process if one does not see the file that the first process has locked."""
    end = time.monotonic() + PATIENCE
    while not (path / FILE_NAME).exists() and time.monotonic() < end:
        time.sleep(0.1)
    blind = {host for host, seen in parallel.gather_objects((platform.node(), (path / FILE_NAME).exists())) if not seen}
    if blind:
        raise ValueError(f"workdir {path} is another folder on {', '.join(sorted(blind))} than on the first host of the job; "
                         "mount storage on all of them (sudo mount -t nfs SERVER:/SHARE /mnt/SHARE) and give a --workdir in it")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the folder of a run, and what to do, in an OSError raised within."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, f"cannot write to workdir {path}: {error.strerror}; check its permissions and free "
                          "space, or choose another --workdir") from error


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    made = not path.exists()
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        lock = _take(path / FILE_NAME)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock still holds
            (path / FILE_NAME).write_text(json.dumps({"host": platform.node(), "pid": os.getpid(), "started": _now()}))
        yield
    finally:
        if made and os.listdir(path) == [FILE_NAME]:
            (path / FILE_NAME).unlink()
            path.rmdir()
        lock.release()


def _take(path: Path) -> FileLock:
    """The lock, taken; RuntimeError if another process has it. Warns if files cannot be locked."""
    lock = FileLock(path, timeout=0.2, fallback_to_soft=False)  # its last holder may remove the file while it is opened
    try:
        lock.acquire(poll_interval=0.05)
    except Timeout:
        raise RuntimeError(
            f"{path.parent} is in use by another run ({_holder(path)}): wait for its end, stop it, or choose another "
            "--workdir. If that machine is gone, its lock goes once the file server gives it up") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        warnings.warn(f"{path.parent} cannot be locked, its file system does not support it ({error.strerror}): start no "
                      "second run in this folder", RuntimeWarning, stacklevel=2)
    return lock


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"host {holder['host']}, process {holder['pid']}, since {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):  # it was locked a moment ago, or the disk was full
        return f"see {path}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
