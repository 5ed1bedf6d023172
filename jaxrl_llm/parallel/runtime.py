"""Several processes as one program: how they find each other, and the few exchanges between their hosts.

Every process runs the same host code on the same host data, in the same order; what could differ between them is agreed on
(`agree`), or read or computed in shares that are combined again (`gather`).
"""
import contextlib
import functools
import itertools
import os
import pickle
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 25  # a process that is silent for this long is given up, and with it the job
START_SECONDS = 300  # how much later than the first the last process of a job may start
BARRIER_SECONDS = 600  # the same for a barrier; it covers work that processes do not share, such as a slow disk of one
_LOST = 134  # exit code of an abort, with which the runtime itself ends a process that lost another
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # set by launchers that start several
_barriers = itertools.count()  # all processes reach the same ones in the same order; a name may be reused


@contextlib.contextmanager
def job(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None,
        multihost: bool = False) -> Iterator[None]:
    """Joins the other processes of a job, if it has any. Enter it before anything touches a device.

    They are given (`coordinator` "host:port", their number, and the index of this one) or detected: by SLURM or Open MPI if
    these started several tasks, and with `multihost` also on TPU slices and under Kubernetes (see `jax.distributed`).

    If this process is one of several and leaves with an error, it ends at once so that the others do not wait for it. Exit
    code 134 means that the runtime failed, as it does when another process is gone (it may also abort with that code by
    itself): restarting the whole job will help. Other errors have exit code 1.

    Raises ValueError when only some of the three are given.
    """
    given = [x is not None for x in (coordinator, processes, process_id)]
    if any(given) and not all(given):
        raise ValueError(f"coordinator={coordinator!r}, processes={processes}, process_id={process_id}: give all three, or "
                         "none and multihost=True on a cluster that sets them")
    if any(given) or multihost or any(int(os.environ.get(name, "1")) > 1 for name in _TASKS):
        _join(coordinator, processes, process_id)
    try:
        yield
    except Exception as error:
        if several():
            _end(error)
        raise


def _join(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    # On CPUs programs would run concurrently, with collectives that wait for each other's threads forever.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    where = coordinator or "the address that the cluster tells"
    notice = threading.Timer(START_SECONDS / 10, functools.partial(print, (
        f"still waiting for the other processes of the job, until {START_SECONDS} s have passed: see whether all "
        f"{processes or ''} were started, each with an id of its own, and reach process 0 at {where}"),
        file=sys.stderr, flush=True))
    notice.daemon = True
    notice.start()  # printed in time: the runtime mostly aborts when it gives up
    try:
        jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=START_SECONDS,
                                   heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=60)
    except jax.errors.JaxRuntimeError as error:
        print(f"the processes of the job did not find each other: {error}", file=sys.stderr, flush=True)
        raise SystemExit(_LOST) from error
    finally:
        notice.cancel()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX catches it, and no one else would receive it


def several() -> bool:
    """Whether this process is one of several."""
    return jax.process_count() > 1


def is_primary() -> bool:
    """Whether this process is the one that prints, and that writes all files other than checkpoints."""
    return jax.process_index() == 0


def _end(error: Exception) -> None:
    lost = _is_loss(error)
    traceback.print_exception(error)
    print(f"process {jax.process_index()} of {jax.process_count()} ends, and with it the job"
          + (": a process was lost, or the connection to it" if lost else f": {type(error).__name__}: {error}"),
          file=sys.stderr, flush=True)
    os._exit(_LOST if lost else 1)


def _is_loss(error: BaseException | None) -> bool:
    """Whether the runtime failed for a reason outside the program, whose own errors would occur again."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return not str(error).startswith(("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED"))
    return error is not None and _is_loss(error.__cause__)


def barrier(name: str) -> None:
    """Waits until every process has arrived here.

    Raises TimeoutError if one has not arrived after `BARRIER_SECONDS`: it hangs, or waits for something else. The barrier is
    not a collective of the devices, which would wait forever.
    """
    if not several():
        return
    from orbax.checkpoint import multihost

    try:
        multihost.get_barrier_sync_fn()(key=f"{name}:{next(_barriers)}", timeout_ms=1000 * BARRIER_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"not all {jax.process_count()} processes reached the barrier {name!r} within {BARRIER_SECONDS} s; "
                           "the last lines of the others' logs show where they hang") from error


def agree(value: int) -> int:
    """The largest of the processes' values."""
    return int(gather(np.array([value], np.int64)).max())


def gather(rows: np.ndarray) -> np.ndarray:
    """The rows of all processes, one after another `[processes * N, ...]`, bit by bit; N must be equal in all."""
    if not several():
        return rows
    rows = np.ascontiguousarray(rows)
    gathered = np.asarray(multihost_utils.process_allgather(rows.view(np.uint8).reshape(-1)))
    return gathered.reshape(-1).view(rows.dtype).reshape(-1, *rows.shape[1:])


def gather_objects(value) -> list:
    """Values of any kind, of all processes in order."""
    if not several():
        return [value]
    packed = np.frombuffer(pickle.dumps(value), np.uint8)
    rows = gather(np.pad(packed, (0, agree(len(packed)) - len(packed)))[None])  # a pickle knows where it ends
    return [pickle.loads(row) for row in rows]


def first(value):
    """The value of the first process."""
    return gather_objects(value)[0]


def check_same(values: Mapping[str, str], hint: str) -> None:
    """Raises ValueError with the values of two processes, and a hint, if the processes differ in one of these, by name."""
    seen = gather_objects((platform.node(), dict(values)))
    for number, (host, mine) in enumerate(seen):
        for name in sorted({*seen[0][1], *mine}):
            ours, theirs = seen[0][1].get(name, "none"), mine.get(name, "none")
            if ours != theirs:
                raise ValueError(f"the processes of this job differ in {name}: process 0 on {seen[0][0]} has {ours}, process "
                                 f"{number} on {host} has {theirs}; {hint}")


def put(tree, sharding):
    """Host arrays (equal in all processes) or device arrays, sharded by `sharding`: one sharding, or a tree of them."""
    if not several():
        return jax.device_put(tree, sharding)
    shardings = jax.tree.broadcast(sharding, tree)
    return jax.tree.map(_put, tree, shardings)


def _put(x, sharding):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else _lay(sharding)(x)
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put(np.asarray(jax.random.key_data(x)), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@functools.cache
def _lay(sharding):
    """Moves an array between layouts of the same devices, which `device_put` does not do across processes on CPUs."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def fetch(tree):
    """Device arrays as whole host arrays, in every process."""
    if not several():
        return jax.device_get(tree)
    return jax.tree.map(_fetch, tree)


def _fetch(x):
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return jax.device_get(x)
