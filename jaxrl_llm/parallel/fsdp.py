"""Forward passes over a mesh, every shard of `data` x `fsdp` x `seq` with its own rows: weights are sent, activations stay.

Left to itself, the compiler splits matrix products over `fsdp` as over `tensor`, gathers activations instead of weights, and
in loops over rows lets every device work on all devices' rows.
"""
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.parallel.mesh import batch_sharding, rows_sharding, shards_of
from jaxrl_llm.parallel.rules import PIECES, axes_of, path_name, spec_of

Tree = Any
_LAYERS = "layers/"


def over_rows(function: Callable, mesh: Mesh | None, dtype: Any, weights: Tree, others: Tree, rows: Tree,
              cut: bool = False) -> Tree:
    """`function(weights, others, rows, whole)`, whose result for a row depends on that row alone, on every shard's own rows.

    The weights are sharded by the partition table. `function` gets tables gathered over `fsdp`, and layers as shards, which
    `whole(layer) -> layer` gathers when they are used, and again in the backward pass if they are not kept. Gradients take the
    reverse way: scattered over `fsdp`, then summed over `data`. `tensor` is left to the compiler.

    Args:
      function: see above; where there is one shard it is called as it is, `whole` being the identity.
      mesh: or None.
      dtype: layers are cast to it before they travel, as they are at use.
      weights: parameters of a `Transformer`.
      others: arrays that every device has whole.
      rows: arrays `[P, ...]`; P is a multiple of data x fsdp x seq.
      cut: whether rows are `[R, N, ...]` instead, R a multiple of data x fsdp and N one of seq, over which slots are sharded.
    Returns:
      Arrays `[P, ...]`, or `[R, N]`, sharded like the rows.
    """
    # The compiler does not partition kernels of accelerators: on their meshes every axis is manual.
    if mesh is None or mesh.size == 1 or shards_of(mesh.shape) == 1 and mesh.devices.flat[0].platform == "cpu":
        return function(weights, others, rows, lambda layer: layer)
    spread = (rows_sharding if cut else batch_sharding)(mesh).spec
    axes = {"data", "fsdp", "seq"} if mesh.shape["seq"] > 1 else {"data", "fsdp"}
    leaves = [(path_name(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(weights)]
    table = {name: spec_of(name, shape, mesh.shape) for name, shape in leaves}
    pieces = jax.tree.map_with_path(lambda path, _: _along(PIECES, table[path_name(path)]), weights)

    def whole(layer):
        return jax.tree.map_with_path(  # of the stack, which has one axis more
            lambda path, leaf: _gathered(leaf, PartitionSpec(*table[_LAYERS + path_name(path)][1:]), dtype), layer)

    def shard(weights, others, rows):
        tables = {name: _gathered(leaf, table[name], leaf.dtype) for name, leaf in weights.items() if name in table}
        return function({**weights, **tables}, others, rows, whole)

    return jax.shard_map(shard, mesh=mesh, axis_names=axes, in_specs=(pieces, PartitionSpec(), spread),
                         out_specs=spread, check_vma=False)(weights, others, rows)


def _along(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    """The part of a partition that concerns some axes."""
    kept = [tuple(axis for axis in axes_of(entry) if axis in axes) for entry in spec]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def _gathered(leaf: jax.Array, spec: PartitionSpec, dtype: Any) -> jax.Array:
    """A leaf sharded by `spec`, gathered over `fsdp` and `seq`; over `tensor` it stays sharded."""
    pieces, kept = tuple(_along(PIECES, spec)), _along(("tensor",), spec)
    if not any(pieces):
        return leaf
    dimension, stored = next(i for i, axes in enumerate(pieces) if axes), leaf.dtype
    axes = pieces[dimension]

    @jax.custom_vjp
    def gather(leaf):
        return jax.lax.all_gather(leaf.astype(dtype), axes, axis=dimension, tiled=True)

    def scatter(_, gradient):  # summed in the precision of the weights, not in that of the products
        return jax.lax.psum_scatter(gradient.astype(stored), axes, scatter_dimension=dimension, tiled=True),

    gather.defvjp(lambda leaf: (gather(leaf), None), scatter)
    if "tensor" not in kept:
        return gather(leaf)
    # Manual as well: a gather in which an axis is left to the compiler first gathers over that axis.
    return jax.shard_map(gather, axis_names={"tensor"}, in_specs=kept, out_specs=kept, check_vma=False)(leaf)
