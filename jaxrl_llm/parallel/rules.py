"""The partition table: path of a leaf -> how its axes are sharded over the mesh."""
import logging
import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# `fsdp` takes the dimension that `tensor` leaves: gathering a matrix over one of them is a single all-gather, and does not
# change its sharding over the other. Weights are sharded over `seq`, which cuts rows, as over `fsdp`, which spreads them.
# Leaves of layers have a leading layer axis. First match wins; the rest is replicated.
PIECES = ("fsdp", "seq")
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(^|/)(embed|unembed)$", PartitionSpec("tensor", PIECES)),
    (r"layers/(q|k|v|gate|up|shared_gate|shared_up)/kernel$", PartitionSpec(None, PIECES, "tensor")),
    (r"layers/(q|k|v|gate|up)/bias$", PartitionSpec(None, "tensor")),
    (r"layers/(o|down|shared_down)/kernel$", PartitionSpec(None, "tensor", PIECES)),
    (r"layers/experts_(gate|up)/kernel$", PartitionSpec(None, None, PIECES, "tensor")),  # shards of every expert
    (r"layers/experts_down/kernel$", PartitionSpec(None, None, "tensor", PIECES)),
)

_log = logging.getLogger(__name__)


def path_name(path) -> str:
    """A key path of `jax.tree_util` as `a/b/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one dimension of a partition is sharded over."""
    return (entry,) if isinstance(entry, str) else entry or ()


def spec_of(path: str, shape: tuple[int, ...], sizes: Mapping[str, int], left_out: tuple[str, ...] = ()) -> PartitionSpec:
    """Partition of the leaf at `path` over mesh axes of these `sizes`; an axis that does not divide is logged and dropped.

    Arrays are not sharded over axes that are `left_out`, nor over `seq` if it has size 1 or does not exist.
    """
    left_out = left_out if sizes.get("seq", 1) > 1 else (*left_out, "seq")
    rule = next((spec for pattern, spec in RULES if re.search(pattern, path)), PartitionSpec())
    if len(rule) > len(shape):
        return PartitionSpec()
    fitted = []
    for size, axes in zip(shape, rule):
        kept: list[str] = []
        for axis in axes_of(axes):
            if axis in left_out:
                continue
            if size % math.prod([sizes[name] for name in (*kept, axis)]) == 0:
                kept.append(axis)
            else:
                _log.info("%s %s: dimension %d does not divide by mesh axis %r, kept whole", path, shape, size, axis)
        fitted.append(tuple(kept) or None)
    while fitted and fitted[-1] is None:  # as jax writes the shardings of results: equal layouts then compare equal
        fitted.pop()
    return PartitionSpec(*fitted)


def tree_shardings(tree, mesh: Mesh, left_out: tuple[str, ...] = ()):
    """A sharding for every leaf of `tree` (arrays or shapes), by its path: parameters and optimiser moments alike.

    The path of moments with one number per weight ends in the weight's path, so they are sharded like it; factored ones, which
    lack an axis, are replicated.
    """
    return jax.tree.map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path_name(path), leaf.shape, mesh.shape, left_out)), tree)


def rollout_shardings(tree, mesh: Mesh):
    """As `tree_shardings`, for sampling, which reads all weights for every token: sharded over `tensor` alone."""
    return tree_shardings(tree, mesh, left_out=PIECES)


def with_shardings(shapes, shardings):
    """Shapes with shardings, to compile for arrays that do not exist yet."""
    return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, shardings)
