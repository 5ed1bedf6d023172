"""The partition table: path of a leaf -> how its axes lie on the mesh."""
import functools
import logging
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# `fsdp` takes the dimension that `tensor` leaves: putting a matrix together over one of them is a single all-gather, and does
# not touch how it lies over the other. Leaves of layers carry a leading layer axis. First match wins; the rest is replicated.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(^|/)(embed|unembed)$", PartitionSpec("tensor", "fsdp")),
    (r"layers/(q|k|v|gate|up)/kernel$", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers/(q|k|v)/bias$", PartitionSpec(None, "tensor")),
    (r"layers/(o|down)/kernel$", PartitionSpec(None, "tensor", "fsdp")),
)

_log = logging.getLogger(__name__)


def path_name(path) -> str:
    """A key path of `jax.tree_util` as `a/b/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh, left_out: str | None = None) -> PartitionSpec:
    """Partition of the leaf at `path`; an axis that does not divide its dimension stays whole there, and is logged.

    One axis can be `left_out`: what the table spreads over it is then whole.
    """
    rule = next((spec for pattern, spec in RULES if re.search(pattern, path)), PartitionSpec())
    if len(rule) > len(shape):
        return PartitionSpec()
    fitted = []
    for size, axes in zip(shape, rule):
        kept = []
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            if axis == left_out:
                continue
            parts = mesh.shape[axis]
            for other in kept:
                parts *= mesh.shape[other]
            if size % parts == 0:
                kept.append(axis)
            else:
                _log.info("%s %s: dimension %d does not divide by mesh axis %r, kept whole", path, shape, size, axis)
        fitted.append(tuple(kept) or None)
    while fitted and fitted[-1] is None:  # as jax writes the shardings of results: equal layouts then compare equal
        fitted.pop()
    return PartitionSpec(*fitted)


def tree_shardings(tree, mesh: Mesh):
    """A sharding for every leaf of `tree` (arrays or shapes), by its path: parameters and optimiser moments alike."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path_name(path), leaf.shape, mesh)), tree)


def rollout_shardings(tree, mesh: Mesh):
    """As `tree_shardings`, for sampling, which reads all weights for every token: in pieces over `tensor` alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(path_name(path), leaf.shape, mesh, left_out="fsdp")), tree)


def reshard(params, mesh: Mesh, dtype):
    """The parameters in the layout of `rollout_shardings`; those themselves where this is how they lie, without `fsdp`.

    What lies in pieces over `fsdp` is cast to `dtype` first, as it is at use, so that no more is gathered than is read.
    """
    return params if mesh.shape["fsdp"] == 1 else _reshard(params, mesh, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _reshard(params, mesh, dtype):
    def gather(leaf, train, rollout):
        if train == rollout:
            return leaf
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(leaf.astype(dtype), train), rollout)

    return jax.tree.map(gather, params, tree_shardings(params, mesh), rollout_shardings(params, mesh))
