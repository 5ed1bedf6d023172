"""Where the rows of an engine lie: on one device, or in equal shards over the replicas of a mesh."""
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm import parallel
from jaxrl_llm.engines.requests import Row
from jaxrl_llm.parallel.rules import rollout_shardings


class Shards(NamedTuple):
    """R row slots in N shards, each on a replica: the devices of a mesh that differ in `tensor` alone.

    Slots have one number throughout, `shard * rows + slot of the shard`; programs see the slots of one shard.

    device: where everything lies without a mesh.  mesh: None: one device.  parts: N.  rows: R / N.
    """

    device: jax.Device
    mesh: Mesh | None
    parts: int
    rows: int

    def of(self, slot: int) -> int:
        """The shard of a slot."""
        return slot // self.rows

    def slots(self, shard: int) -> range:
        """The slots of a shard."""
        return range(shard * self.rows, (shard + 1) * self.rows)

    def same(self, tree: Any) -> Any:
        """Arrays that all shards share."""
        return jax.device_put(tree, self.device if self.mesh is None else parallel.replicated(self.mesh))

    def weights(self, tree: Any) -> Any:
        """Parameters, sharded over `tensor`."""
        return jax.device_put(tree, self.device if self.mesh is None else rollout_shardings(tree, self.mesh))

    def by_row(self, tree: Any, axis: int = 0, heads: int | None = None) -> Any:
        """Arrays whose `axis` is cut into shards; their axis `heads` is that of key/value heads, None: they have none."""
        if self.mesh is None:
            return jax.device_put(tree, self.device)
        return jax.device_put(tree, jax.tree.map(functools.partial(_spec, self.mesh, axis, heads), tree))

    def zeros(self, tree: Any, axis: int = 0, heads: int | None = None) -> Any:
        """As `by_row` of arrays on the host that are all zero; on a mesh devices make them, and the host sends nothing."""
        if self.mesh is None:
            return jax.device_put(tree, self.device)
        leaves, names = jax.tree.flatten(tree)
        shapes = tuple((x.shape, x.dtype, _spec(self.mesh, axis, heads, x)) for x in leaves)
        return jax.tree.unflatten(names, _zeros(shapes)())

    def fetched(self, tree: Any, shard: int, axis: int = 0) -> Any:
        """The part of a shard of arrays whose `axis` is cut into shards, on the host; the others' parts are not sent."""
        if self.mesh is None:
            return jax.device_get(tree)

        def part(x):
            size = x.shape[axis] // self.parts
            out = np.empty((*x.shape[:axis], size, *x.shape[axis + 1:]), x.dtype)
            for piece in x.addressable_shards:
                if piece.replica_id == 0 and (piece.index[axis].start or 0) == shard * size:
                    out[(*piece.index[:axis], slice(None), *piece.index[axis + 1:])] = piece.data
            return out

        return jax.tree.map(part, tree)

    def padded(self, parts: Sequence[Sequence[int]], fill: int, count: int) -> np.ndarray:
        """i32[N count], the numbers of each shard."""
        return np.asarray([value for part in parts for value in (*part, *[fill] * (count - len(part)))], np.int32)


def _spec(mesh: Mesh, axis: int, heads: int | None, x: Any) -> NamedSharding:
    if not x.size:  # as programs return it: in another layout they would compile again
        return parallel.replicated(mesh)
    cut = heads is not None and x.ndim > heads and x.shape[heads] % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec(*(
        rows_of(mesh) if i == axis else "tensor" if cut and i == heads else None for i in range(x.ndim))))


@functools.cache
def _zeros(shapes: tuple) -> Callable[[], list[jax.Array]]:
    """Makes arrays of these `(shape, dtype, sharding)`."""
    return jax.jit(lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in shapes], out_shardings=[one for *_, one in shapes])


def shards(device: jax.Device, mesh: Mesh | None, slots: int) -> Shards:
    """Shards with room for this number of slots at least."""
    count = 1 if mesh is None else parallel.shards_of(mesh.shape)
    return Shards(device, mesh, count, -(-slots // count))


class Places:
    """Deals free slots to waiting rows: to shards in equal numbers, and rows with one prompt to one shard where that is even.

    Slots of idle rows are free.
    """

    def __init__(self, shards: Shards, slots: Sequence[Row | None], waiting: int, known: Iterable[tuple[int, tuple[int, ...]]]):
        """`waiting`: number of rows.  known: shard and tokens of the prompts that are read."""
        of_shards = [[slots[slot] for slot in shards.slots(shard)] for shard in range(shards.parts)]
        self._load = [sum(row is not None and not row.idle for row in rows) for rows in of_shards]
        self._free = [shards.rows - load for load in self._load]
        self._fair = -(-(sum(self._load) + min(waiting, self.left)) // shards.parts)
        self._known = {} if shards.parts == 1 else {tokens: shard for shard, tokens in known}

    @property
    def left(self) -> int:
        """Number of free slots."""
        return sum(self._free)

    def choose(self, row: Row, home: int | None) -> int | None:
        """The shard of a waiting row: its `home` if it has one; None: it must wait for a slot there."""
        prompt = tuple(row.tokens[:-1]) if row.new else None
        shard = self._known.get(prompt) if home is None else home
        if home is None and (shard is None or not self._free[shard] or self._load[shard] >= self._fair):
            shard = min((shard for shard, free in enumerate(self._free) if free), key=self._load.__getitem__)
        if not self._free[shard]:
            return None
        self._free[shard] -= 1
        self._load[shard] += 1
        if prompt is not None:
            self._known[prompt] = shard
        return shard


def pieces_of(mesh: Mesh | None, kv_heads: int) -> int:
    """The number of devices over which the compiler shards matrices and heads: `tensor`, if it divides the heads; else 1.

    Every device then works with all of them.
    """
    return 1 if mesh is None or kv_heads % mesh.shape["tensor"] else mesh.shape["tensor"]


def rows_of(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh over which rows are sharded."""
    return parallel.batch_sharding(mesh).spec[0]


def of_rows(*, static: Sequence[str], donated: Sequence[str] = (), same: Sequence[str] = (),
            axes: Callable[[dict[str, Any]], dict[str, int]] = lambda static: {}, results: Any = 0):
    """Compiles a program of rows; with `mesh=` each shard runs it for the rows that it has, beside the others.

    Args:
      static, donated: names of arguments, as those of `jax.jit`.
      same: names of arguments that all shards share.
      axes: from the static arguments, the axis of rows of those arguments for which it is not 0.
      results: the axis of rows of the results, or a tree of axes; names stand for the axes of arguments.
    """
    def decorate(run: Callable) -> Callable:
        signature = inspect.signature(run)

        @functools.cache
        def compiled(mesh: Mesh | None) -> Any:
            if mesh is None:
                return jax.jit(run, static_argnames=static, donate_argnames=donated)

            @functools.wraps(run)
            def on_shards(*args, **kwargs):
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                fixed = {name: x for name, x in given.arguments.items() if name in static}
                arrays = {name: x for name, x in given.arguments.items() if name not in static}
                known = axes(fixed)

                def spec(axis):
                    axis = known.get(axis, 0) if isinstance(axis, str) else axis
                    return PartitionSpec(*[None] * axis, rows_of(mesh))

                inputs = {name: PartitionSpec() if name in same else spec(name) for name in arrays}
                whole = "model" in fixed and pieces_of(mesh, fixed["model"].config.num_kv_heads) == 1
                names = {*mesh.axis_names} - (set() if whole else {"tensor"})  # the compiler cuts matrices and heads
                return jax.shard_map(lambda arrays: run(**fixed, **arrays), mesh=mesh, in_specs=(inputs,), axis_names=names,
                                     out_specs=jax.tree.map(spec, results), check_vma=False)(arrays)

            return jax.jit(on_shards, static_argnames=static, donate_argnames=donated)

        @functools.wraps(run)
        def program(*args, mesh: Mesh | None = None, **kwargs):
            return compiled(mesh)(*args, **kwargs)

        program.lower = lambda *args, mesh=None, **kwargs: compiled(mesh).lower(*args, **kwargs)  # type: ignore[attr-defined]
        return program

    return decorate
