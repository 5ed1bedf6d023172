"""One run at a time in a folder: a lock that the system takes back with the process, however that ends."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxrl_llm import parallel

FILE_NAME = "run.lock"
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # by some NFS and FUSE mounts


@contextlib.contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Holds the run folder `path`, which is made if need be, and removed again if nothing was put there.

    Of several processes the first one locks, and all of them hear of it. Readers of the folder need no lock. Raises, in every
    process, RuntimeError if a living run has the folder and OSError if it cannot be written.
    """
    path, problem = Path(path).expanduser().absolute(), None
    with contextlib.ExitStack() as held:
        if parallel.is_primary():
            try:
                held.enter_context(_hold(path))
            except (RuntimeError, OSError) as error:
                problem = error
        found = next(filter(None, parallel.gather_objects(problem)), None)
        if found is not None:
            raise found
        yield


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[None]:
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = _take(path / FILE_NAME)
    except BlockingIOError:
        raise RuntimeError(
            f"{path} is in use by another run ({_holder(path / FILE_NAME)}): wait for its end, stop it, or choose another "
            "--workdir. If that machine is gone, its lock goes once the file server gives it up") from None
    except OSError as error:
        raise type(error)(error.errno, f"cannot write to workdir {path}: {error.strerror}; check its permissions and free "
                          "space, or choose another --workdir") from error
    with file:
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            file.truncate(0)
            file.write(json.dumps({"host": platform.node(), "pid": os.getpid(), "started": _now()}).encode())
        os.register_at_fork(after_in_child=file.close)  # a lock lives as long as any copy of its file is open
        try:
            yield
        finally:
            if made and os.listdir(path) == [FILE_NAME]:
                (path / FILE_NAME).unlink()
                path.rmdir()


def _take(path: Path) -> BinaryIO:
    """The file, locked; BlockingIOError if another process has it. Where files cannot be locked, a warning."""
    while True:
        file = open(path, "a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                file.close()
                raise
            warnings.warn(f"{path.parent} cannot be locked, its file system does not support it ({error.strerror}): start no "
                          "second run in this folder", RuntimeWarning, stacklevel=2)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # its last holder has removed it since it was opened


def _holder(path: Path) -> str:
    try:
        told = json.loads(path.read_text())
        return f"host {told['host']}, process {told['pid']}, since {told['started']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just been locked, or the disk was full
        return f"see {path}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
