"""Checkpoints of a run: saved in the background, published atomically, verified when read, never lost to a failed save.

One checkpoint holds two items: `state`, a pytree of arrays (typed PRNG keys included), and `host`, anything JSON can
hold, such as the cursor of the data iterator and counters. Every tensor has a checksum, because a flipped bit in
a compressed chunk could otherwise be read back silently.
"""
import contextlib
import errno
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil
from etils import epath

from jaxrl_llm import parallel
from jaxrl_llm.store import bucket, preemption
from jaxrl_llm.store.bucket import AnyPath

PyTree = Any


class Restored(NamedTuple):
    """The result of `Checkpoints.restore`; `skipped`: (step, reason) of newer checkpoints that it could not use."""

    step: int
    state: PyTree
    host: Any
    skipped: tuple[tuple[int, str], ...]


class Checkpoints:
    """The checkpoints below `directory`: the newest `keep` of them, plus every `keep_every`-th step permanently.

    An interrupt (SIGINT) waits for the end of `save`, `wait` and `close`: raised inside orbax, it can leave a save that
    never ends. A reader that must not disturb a live run (evaluation) passes `read_only=True`; a writer removes the remains
    of a killed save. Raises FileNotFoundError if a reader's directory does not exist.
    """

    def __init__(self, directory: str | AnyPath, keep: int = 3, keep_every: int | None = None, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.directory = bucket.place(directory)
        self.keep = keep
        if read_only and not self.directory.is_dir():
            raise FileNotFoundError(f"no checkpoint directory {self.directory}; give the checkpoints folder of a run")
        # Listed before the writer clears them, so that `restore` can report which save was cut short.
        self._unfinished = sorted(step for step, _ in self._remains())
        self._handlers = {"state": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
        with _quiet() if read_only else contextlib.nullcontext():
            if read_only:
                options = ocp.CheckpointManagerOptions(read_only=True, create=False)
            else:
                options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=keep_every, cleanup_tmp_directories=True)
            self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=self._handlers)
        self._pending: int | None = None  # the step being written in the background
        self._current: int | None = None  # the step that this process last saved or restored
        self._torn = False  # whether a second interrupt left orbax within a save, in which it may wait for ever

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        try:
            self.close()
        except Exception as error:  # the last save failed: an error, unless another one is already raised
            if value is None:
                raise
            value.add_note(str(error))

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if self._pending is None:  # a reader must see checkpoints that a live run has published since
            self._manager.reload()
        return sorted(self._manager.all_steps())

    @preemption.undisturbed()
    def save(self, step: int, state: PyTree, host: Any = None) -> None:
        """Starts writing `state` (arrays) and `host` (JSON) as step `step`; returns once the arrays may be donated.

        Saving the current step again does nothing. Checkpoints of later steps, left by a run that was resumed from an older
        one, are moved to `abandoned/`. Raises OSError if the previous save failed or the disk lacks room, ValueError if `step`
        goes back, TypeError if a leaf is not an array or `host` is not JSON; the last complete checkpoint is kept in each case.
        """
        if self._torn:
            raise OSError("the save that was interrupted twice cannot be made again in this process")
        self._finish()
        if step == self._current:
            return
        if self._current is not None and step < self._current:
            raise ValueError(f"save(step={step}) after step {self._current}: steps must increase")
        arrays = _to_storage(state)
        content = {"host": host, "checksums": checksums(arrays)}
        text = json.dumps(content)  # raises TypeError here rather than in the background
        self._check_room(step, arrays, len(text))
        self.abandon(step)
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(arrays), host=ocp.args.JsonSave(content))
        self._pending = step
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._torn = True
            raise
        self._current = step

    @preemption.undisturbed()
    def wait(self) -> None:
        """Blocks until the running save is published; raises OSError if it failed, after removing its remains."""
        self._finish()

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._pending = None

    @preemption.undisturbed()
    def close(self) -> None:
        """Waits for the running save and releases the directory."""
        if self._torn:
            return
        try:
            self._finish()
        finally:
            self._manager.close()

    def restore(self, target: PyTree, step: int | None = None, *, part: bool = False, former: PyTree = None) -> Restored:
        """Reads `step`, or the newest intact checkpoint, into the structure and shardings of `target`.

        With `part` the target may omit branches of the stored tree, which are not read. `former`: the target by the names of
        an earlier version, whose structure the state of a checkpoint with these names has.

        `target` has arrays or `jax.ShapeDtypeStruct`s (with `sharding`; without one the leaf goes to the first local device) as
        leaves. Damaged checkpoints are skipped with a warning unless `step` names one, or they lie in a bucket. Raises
        FileNotFoundError if there is nothing to read, ValueError naming each tensor whose shape or type differs, OSError if
        nothing intact is left.
        """
        self.wait()
        available = self.steps()
        if not available or (step is not None and step not in available):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise FileNotFoundError(f"no complete {wanted} in {self.directory}; available steps: {available or 'none'}")
        targets = [target] if former is None else [former, target]
        skipped, candidates = [], [step]
        if step is None:
            skipped = [(s, "its save was cut short") for s in self._unfinished if s > available[-1]]
            candidates = available[::-1][:None if isinstance(self.directory, Path) else 1]
        for candidate in candidates:
            stored, problem = _in_all(self._stored_tensors, candidate)
            if problem is None:
                target = next((tree for tree in targets if _named_leaves(tree).keys() <= stored.keys()), targets[-1])
                abstract = jax.tree.map(_abstract, target)
                _check_tensors(abstract, stored, f"{self.directory}/{candidate}", part)
                stored, problem = _in_all(self._read, candidate, abstract)
            if problem is None:  # every process has its pieces now, and the checksums need all of them
                (state, content), (_, problem) = stored, _in_all(_check_sums, *stored)
            if problem is None:
                return self._restored(candidate, _from_storage(target, state), content["host"], skipped)
            skipped.append((candidate, problem))
            stored = state = None  # makes room for the next one
        reasons = "; ".join(f"step {s}: {reason}" for s, reason in skipped)
        others = [s for s in available if s != step]
        hint = f"other steps: {others}" if step is not None and others else "no other checkpoint is left"
        if step is None and len(candidates) < len(available):  # the bucket may have failed for a moment
            hint = "try again; if it stays so, delete that folder, and the run continues from the one before"
        raise OSError(f"no intact checkpoint in {self.directory} ({reasons}); {hint}")

    def _restored(self, step: int, state: PyTree, host: Any, skipped: list[tuple[int, str]]) -> Restored:
        self._current = step
        if skipped:
            reasons = "; ".join(f"step {s}: {reason}" for s, reason in skipped)
            warnings.warn(f"restored step {step}, the newest intact checkpoint of {self.directory}; unusable: {reasons}",
                          RuntimeWarning, stacklevel=3)
        return Restored(step, state, host, tuple(skipped))

    def _stored_tensors(self, step: int) -> dict[str, Any]:
        """Name -> metadata (shape, dtype) of the tensors of a checkpoint; raises if its files cannot be read."""
        metadata = self._manager.item_metadata(step)["state"]
        if metadata is None:
            raise OSError("its list of tensors is missing")
        leaves = jax.tree.leaves(metadata.tree, is_leaf=lambda x: hasattr(x, "shape"))
        return {leaf.name: leaf for leaf in leaves if hasattr(leaf, "shape")}

    def _read(self, step: int, abstract: PyTree) -> tuple[PyTree, Any]:
        """The stored arrays and `{"host": ..., "checksums": ...}`.

        Branches without arrays need not be stored: states of later versions have further ones. It uses handlers without the
        manager's barriers: a process that cannot read its pieces must be able to tell others.
        """
        folder = self.directory / str(step)
        content = self._handlers["host"].restore(folder / "host", args=ocp.args.JsonRestore())
        plain = _plain(abstract)
        placed = ocp.checkpoint_utils.construct_restore_args(plain)
        asked = ocp.args.PyTreeRestore(plain, placed, partial_restore=True)
        state = ocp.PyTreeCheckpointHandler().restore(folder / "state", args=asked)
        state = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(state))
        return state, content

    def _check_room(self, step: int, arrays: PyTree, others: int) -> None:
        leaves = jax.tree.leaves(arrays)
        # Compression does not shrink trained weights; the rest is metadata.
        needed = sum(x.nbytes for x in leaves) * 1.05 + others + 2**20
        free = shutil.disk_usage(self.directory).free if isinstance(self.directory, Path) else math.inf
        if needed > free:
            raise OSError(errno.ENOSPC,
                          f"checkpoint of step {step} needs {_size(needed)} but {_size(free)} is free in {self.directory}; "
                          f"kept: steps {self.steps()}; free some space or keep fewer than keep={self.keep}")
        copied = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards if shard.replica_id == 0)
        available = psutil.virtual_memory().available
        if copied > available:
            warnings.warn(f"saving step {step} copies {_size(copied)} to the host, which has {_size(available)} available: "
                          "the process may be killed; save from more hosts",
                          RuntimeWarning,
                          stacklevel=3)

    def _remains(self) -> list[tuple[int, AnyPath]]:
        """(step, folder) of each save that was cut short."""
        if isinstance(self.directory, Path):
            found = [(path.name.split(".")[0], path) for path in self.directory.glob("*.orbax-checkpoint-tmp*")]
        else:
            children = self.directory.iterdir() if self.directory.is_dir() else ()
            found = [(path.name, path) for path in children if path.name.isdecimal() and not bucket.complete(path)]
        return [(int(name), path) for name, path in found if name.isdecimal()]

    def abandon(self, step: int) -> None:
        """Moves checkpoints at or after `step` to `abandoned/`: orbax silently skips a save when a newer step exists.

        In a bucket, which cannot move them, they are deleted: `restore` passes over none of them there.
        """
        newer = [s for s in self.steps() if s >= step]
        parallel.barrier(f"listed_{step}")  # nothing is moved before every process has listed the steps
        if newer and parallel.is_primary():
            where = "deleted"
            if isinstance(self.directory, Path):
                aside = self.directory / "abandoned"
                aside.mkdir(exist_ok=True)
                where = f"in {aside}; delete them when you no longer need them"
            for s in newer:
                if isinstance(self.directory, Path):
                    count = sum(path.name.split("-")[0] == str(s) for path in aside.iterdir())
                    (self.directory / str(s)).rename(aside / f"{s}-{count}")
                else:
                    (self.directory / str(s)).rmtree()
            warnings.warn(f"step {step} is on a new branch: checkpoints {newer} of the old one are now {where}",
                          RuntimeWarning, stacklevel=3)
        parallel.barrier(f"abandoned_{step}")
        self._manager.reload()

    def _fail(self, error: Exception) -> None:
        step, self._pending, self._current = self._pending, None, None
        self._discard(step)
        raise OSError(f"checkpoint of step {step} was not written: {_first_line(error)}; complete ones in {self.directory}: "
                      f"{self.steps() or 'none'}") from error

    def _discard(self, step: int) -> None:
        """Removes the remains of a failed save: on a full disk they would make the next one fail too."""
        for own, path in self._remains() if parallel.is_primary() else ():
            if own == step:
                with contextlib.suppress(OSError):
                    epath.Path(path).rmtree()
        self._manager.reload()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses orbax's warnings, which only report that a reader is read-only."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Dotted path -> leaf, the names that orbax gives to tensors on disk."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _plain(tree: PyTree) -> PyTree:
    """The tree with a plain dict for each dict of another type, which orbax cannot read in part; leaves keep their order."""
    def plain(branch):
        return {name: _plain(inner) for name, inner in branch.items()} if isinstance(branch, dict) else branch

    return jax.tree.map(plain, tree, is_leaf=lambda branch: isinstance(branch, dict))


def _to_storage(state: PyTree) -> PyTree:
    """The pytree with every leaf a plain `jax.Array`: typed keys become their uint32 words."""
    for name, leaf in _named_leaves(state).items():
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float)):
            raise TypeError(f"state leaf {name!r} is a {type(leaf).__name__}, not an array; pass JSON-able values as host=")
    return jax.tree.map(lambda x: jax.random.key_data(x) if isinstance(x, jax.Array) and _is_key(x) else jnp.asarray(x), state)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The stored form of a target leaf, with its sharding."""
    if isinstance(leaf, (bool, int, float)):
        leaf = jnp.asarray(leaf)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    stored = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(stored.shape, jax.dtypes.canonicalize_dtype(stored.dtype), sharding=sharding)


def _from_storage(target: PyTree, arrays: PyTree) -> PyTree:
    """Undoes `_to_storage`: key words become typed keys of the implementation that `target` has."""

    def decode(leaf, stored):
        if not (hasattr(leaf, "dtype") and _is_key(leaf)):
            return stored
        implementation = []  # `key_impl` reads tracers and arrays but no ShapeDtypeStruct
        jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
        return jax.random.wrap_key_data(stored, impl=implementation[0])

    return jax.tree.map(decode, target, arrays)


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """sum_i bits_i (2 i + 1) mod 2^32, whatever the sharding; odd weights, so that any single change shows."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, unsigned)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


def _host_checksum(x: jax.Array) -> int:
    """`_checksum` of this process's pieces of an array in host memory, where no device can sum it.

    With i = sum_a stride_a i_a it is sum bits + 2 sum_a stride_a sum_{i_a} i_a (bits summed over all other axes).
    """
    unsigned = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    total = 0
    for shard in (shard for shard in x.addressable_shards if shard.replica_id == 0):
        bits, stride = np.asarray(shard.data).view(unsigned), 1
        total += int(bits.sum(dtype=np.uint32))
        for axis in reversed(range(bits.ndim)):
            others = tuple(other for other in range(bits.ndim) if other != axis)
            place = np.arange(bits.shape[axis], dtype=np.uint32) + np.uint32((shard.index[axis].start or 0) % 2**32)
            marginal = bits.sum(axis=others, dtype=np.uint32)
            total += 2 * stride * int((place * marginal).sum(dtype=np.uint32))
            stride *= x.shape[axis]
    return total % 2**32


def checksums(arrays: PyTree) -> dict[str, int]:
    """A checksum of 32 bits of each array of a tree, by its dotted path; equal in all processes."""
    # One program at a time: several programs in flight, each with a collective, can occupy all threads of a CPU and wait
    # forever for the device that got none.
    leaves = _named_leaves(arrays)
    sums = {name: int(_checksum(leaf)) for name, leaf in leaves.items() if leaf.sharding.memory_kind != "pinned_host"}
    waiting = {name: _host_checksum(leaf) for name, leaf in leaves.items() if name not in sums}
    parts = parallel.gather_objects(waiting)
    return sums | {name: sum(part[name] for part in parts) % 2**32 for name in waiting}


def _check_sums(arrays: PyTree, content: dict[str, Any]) -> None:
    """Raises OSError naming tensors that differ from the saved ones."""
    actual, expected = checksums(arrays), content["checksums"]
    damaged = [name for name in actual if actual[name] != expected[name]]
    if damaged:
        raise OSError(f"checksum of {', '.join(damaged[:3])} differs ({len(damaged)} of {len(actual)} tensors damaged)")


def _in_all(function: Callable, *arguments) -> tuple[Any, str | None]:
    """`(result, None)` if the call succeeds in every process, else `(None, reason of the first failure)`, equal in all."""
    result = problem = None
    try:
        result = function(*arguments)
    except Exception as error:
        problem = _first_line(error)
    problems = parallel.gather_objects(problem)
    number = next((i for i, one in enumerate(problems) if one is not None), None)
    if number is None:
        return result, None
    return None, problems[number] + (f" (in process {number})" if len(problems) > 1 else "")


def _check_tensors(abstract: PyTree, stored: dict[str, Any], source: str, part: bool) -> None:
    """Raises ValueError naming the tensors that differ from the checkpoint; orbax would silently cast types.

    With `part` the checkpoint may have further tensors.
    """
    wanted = _named_leaves(abstract)
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in stored]
    problems += [f"{name}: in the checkpoint only" for name in stored if name not in wanted and not part]
    for name in [name for name in wanted if name in stored]:
        expected = (tuple(wanted[name].shape), jnp.dtype(wanted[name].dtype).name)
        actual = (tuple(stored[name].shape), jnp.dtype(stored[name].dtype).name)
        if expected != actual:
            problems.append(f"{name}: expected {expected[1]}{list(expected[0])}, got {actual[1]}{list(actual[0])}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{source} was written by another model or optimiser: {'; '.join(problems[:8])}{more}. "
                         "Use the configuration of that run, or start in another workdir")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
