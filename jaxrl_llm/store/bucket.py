"""Run folders in buckets, which know whole objects only: a local folder has the files, and a thread writes them back whole.

A bucket has no append, no rename and no lock. So a run appends, renames and locks in a temporary folder, as in any other, and
each file that has changed replaces its object: every `BEAT` seconds, before each checkpoint and at the end. Checkpoints on
gs:// are written by orbax itself, from all processes; for other buckets they are files of the temporary folder.
"""
import atexit
import contextlib
import datetime
import functools
import json
import os
import platform
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from etils import epath

from jaxrl_llm.tools.files import expanded

LOCK = "run.lock"
BEAT = 30.0  # seconds between two writes of what has changed, and of the lock
PATIENCE = 3  # beats without which another run is taken for dead
COMPLETE = ("commit_success.txt", "_CHECKPOINT_METADATA")  # written last, by orbax on gs:// and here
_PAGES = ("samples", "tensorboard", "eval", "wandb", "diagnostics")  # folders that nothing reads when a run continues
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
_THREADS = 16
_PIECE = 1 << 24  # bytes of a file that are in memory at a time
AnyPath: TypeAlias = Path | epath.Path


def is_bucket(path: Any) -> bool:
    return "://" in str(path)


def native(path: Any) -> bool:
    """Whether orbax reads and writes this bucket itself."""
    return str(path).startswith("gs://")


def place(path: str | os.PathLike) -> AnyPath:
    """The path, absolute, of a local folder or of one in a bucket. Raises ValueError for other URLs and without a bucket."""
    if not is_bucket(path):
        return expanded(path).absolute()
    scheme, _, rest = str(path).partition("://")
    if scheme not in _PACKAGES or not rest.partition("/")[2].strip("/"):
        raise ValueError(f"{str(path)!r} is a URL of another kind; give a local or mounted folder, or gs://BUCKET/FOLDER "
                         "(s3, az and hf likewise)")
    return epath.Path(path)


def complete(step: AnyPath) -> bool:
    """Whether a checkpoint was written to its end, which its name says where folders are renamed."""
    return isinstance(step, Path) or any((step / name).exists() for name in _marks(step))


def _marks(step: AnyPath) -> tuple[str, ...]:
    """Names of objects that a whole checkpoint has; on gs:// orbax writes the second one at the start."""
    return COMPLETE[:1] if native(step) else COMPLETE


@contextlib.contextmanager
def reaching(path: AnyPath) -> Iterator[None]:
    """Raises OSError, which names the bucket and what to do, for any error raised within: each store has its own kinds."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{path} needs a package: pip install {_PACKAGES[str(path).partition('://')[0]]}") from error
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise OSError(f"cannot reach or write {path}: {type(error).__name__}: {text[0][:300]}; check that the bucket exists "
                      "and this machine may list, read, write and delete in it (gcloud auth application-default login, aws "
                      "configure, or the role of the machine), or choose another folder") from error


def local(path: str | os.PathLike, *parts: str) -> Path:
    """A folder to read: of one in a bucket a copy of its files and of all in the folders `parts`, until the process ends."""
    home = place(path)
    if isinstance(home, Path):
        return home
    folder = Path(_copies(), *home.parts[1:])
    with reaching(home):
        _fetch(home, folder, lambda name: any(f"{name}/".startswith(f"{part}/") or f"{part}/".startswith(f"{name}/")
                                              for part in parts))
    return folder


def steps_in(directory: AnyPath) -> list[int]:
    """Steps of the published checkpoints in a folder that need not exist, ascending."""
    children = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(child.name) for child in children if child.name.isdecimal() and complete(child))


def stored(home: AnyPath, name: str, step: int | None) -> AnyPath:
    """The folder `name` of a run's checkpoints, for reading.

    Of a bucket that orbax does not read it is a copy of `step`, or of the newest one.
    """
    if isinstance(home, Path) or native(home):
        return home / name
    with reaching(home):
        newest = steps_in(home / name)[-1:] if step is None else [step]
    return local(home, *(f"{name}/{one}" for one in newest)) / name


@contextlib.contextmanager
def kept(home: AnyPath, continued: bool = False) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A local folder for what lies in `home`, and a function that writes what has changed, which is done at the end as well.

    For a bucket it is a temporary folder, else `home` itself. If `continued`, it has what a run needs to go on: no pages, and
    no checkpoints that orbax reads in the bucket. Raises RuntimeError if another live run has the bucket's folder, OSError if
    the bucket cannot be read and written, before anything else is done.
    """
    if isinstance(home, Path):
        yield home, lambda: None
        return
    with (tempfile.TemporaryDirectory(prefix="jaxrl_llm-") as name, contextlib.closing(_Lease(home)) as lease,
          _repeated(lease.renew)):  # in a thread of its own: a run lives while it copies something large
        mirror = _Mirror(home, Path(name), lease, continued)
        try:
            with _repeated(mirror.write):
                yield mirror.folder, mirror.write
        except BaseException as error:
            try:
                mirror.write()
            except Exception as problem:  # the error that ended the run is the one to show
                error.add_note(f"the last files are not in the bucket: {problem}")
            raise
        mirror.write()


@contextlib.contextmanager
def _repeated(act: Callable[[], None]) -> Iterator[None]:
    """Acts at each beat, in a thread."""
    ended = threading.Event()
    thread = threading.Thread(target=_repeat, args=(act, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _repeat(act: Callable[[], None], ended: threading.Event) -> None:
    """Acts at each beat until the end. A failure is only a warning, as the writing before the next checkpoint fails too."""
    while not ended.wait(BEAT):
        try:
            act()
        except Exception as error:
            warnings.warn(f"{error}; it is tried again", RuntimeWarning, stacklevel=2)


class _Lease:
    """The lock of a folder in a bucket: an object that its holder writes anew at each beat.

    No bucket here creates an object only where none is. Two runs that start within the same moment may both take the lock; the
    first of them that renews it then ends.
    """

    def __init__(self, home: epath.Path):
        self._home, self._file = home, home / LOCK
        self._own = {"host": platform.node(), "pid": os.getpid(), "run": uuid.uuid4().hex}
        first = other = self._holder()
        end = time.monotonic() + PATIENCE * BEAT
        while other is not None and other == first and time.monotonic() < end:
            time.sleep(BEAT / 10)
            other = self._holder()
        if other is not None and other != first:
            raise self._in_use(other)
        self._write()

    def renew(self) -> None:
        """Shows that this run lives. Raises RuntimeError if another one has taken the folder."""
        holder = self._holder() or {}
        if holder.get("run") != self._own["run"]:
            raise self._in_use(holder)
        self._write()

    def close(self) -> None:
        with contextlib.suppress(OSError), reaching(self._home):  # the next run then waits for beats that do not come
            if (self._holder() or {}).get("run") == self._own["run"]:
                self._file.unlink()

    def _write(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        with reaching(self._home):
            self._file.write_bytes(json.dumps(self._own | {"time": now}).encode())

    def _holder(self) -> dict[str, Any] | None:
        with reaching(self._home):
            try:
                return json.loads(self._file.read_bytes())
            except FileNotFoundError:
                return None
            except ValueError:
                return {}

    def _in_use(self, other: dict[str, Any]) -> RuntimeError:
        return RuntimeError(
            f"{self._home} is in use by another run (host {other.get('host')}, process {other.get('pid')}, seen at "
            f"{other.get('time')}): wait for its end, stop it, or choose another folder")


class _Mirror:
    """Files of a local folder as objects of a bucket: what changes is replaced, what is removed is deleted after that."""

    def __init__(self, home: epath.Path, folder: Path, lease: _Lease, continued: bool):
        self.home, self.folder = home, folder
        self._lease, self._one_at_a_time = lease, threading.Lock()
        with reaching(home):
            _fetch(home, folder, lambda name: not continued or PurePosixPath(name).name not in _PAGES,
                   steps=not (continued and native(home)))
        self._written = self._files()

    def write(self) -> None:
        """Writes all changes. Raises OSError if the bucket fails, RuntimeError if another run has taken it."""
        with self._one_at_a_time:
            self._lease.renew()
            now = self._files()
            changed = [name for name, state in now.items() if self._written.get(name) != state]
            last = [name for name in changed if PurePosixPath(name).name in COMPLETE]
            with reaching(self.home), ThreadPoolExecutor(_THREADS) as pool:
                for names in ([name for name in changed if name not in last], last):
                    list(pool.map(self._write_one, names))
                list(pool.map(lambda name: (self.home / name).unlink(missing_ok=True), self._written.keys() - now.keys()))
            self._written = now

    def _write_one(self, name: str) -> None:
        try:
            source = open(self.folder / name, "rb")
        except FileNotFoundError:  # removed a moment ago
            return
        with source, (self.home / name).open("wb") as target:
            shutil.copyfileobj(source, target, _PIECE)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Path -> (time, size) of each file, without locks and parts of files."""
        found = {}
        for folder, _, names in os.walk(self.folder):
            for name in () if ".orbax-checkpoint-tmp" in folder else names:
                if name != LOCK and not name.endswith(".tmp"):
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(os.path.join(folder, name))
                        path = os.path.relpath(os.path.join(folder, name), self.folder)
                        found[path] = (status.st_mtime_ns, status.st_size)
        return found


def _fetch(home: epath.Path, folder: Path, wanted: Callable[[str], bool], steps: bool = True) -> None:
    """Copies the objects of a bucket's folder, with those in its folders whose path is `wanted`.

    Checkpoints that are not whole are left out, and without `steps` all of them.
    """
    def listed(home: epath.Path, folder: Path, below: str) -> Iterator[tuple[epath.Path, Path]]:
        # An object "FOLDER/", by which consoles show an empty folder, is listed as the folder itself.
        children = {child.name: child for child in home.iterdir() if child != home} if home.is_dir() else {}
        if not steps and any(name.isdecimal() for name in children):
            return
        if {*children} & {"state", "host"} and not {*children} & {*_marks(home)}:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name, child in children.items():
            if child.is_dir():
                if wanted(f"{below}{name}"):
                    yield from listed(child, folder / name, f"{below}{name}/")
            elif name != LOCK:
                yield child, folder / name

    def copy(item: tuple[epath.Path, Path]) -> None:
        with item[0].open("rb") as source, open(item[1], "wb") as target:
            shutil.copyfileobj(source, target, _PIECE)

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(copy, listed(home, folder, "")))


@functools.cache
def _copies() -> str:
    """A folder for copies, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm-")
    atexit.register(folder.cleanup)
    return folder.name
