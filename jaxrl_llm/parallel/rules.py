"""The partition table: path of a leaf -> how its axes lie on the mesh."""
import logging
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# `fsdp` shares a dimension with `tensor`, which is the major one: gathering weights for a rollout layout without fsdp is
# then a single all-gather. Leaves of layers carry a leading layer axis. First match wins; the rest is replicated.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(^|/)(embed|unembed)$", PartitionSpec(("tensor", "fsdp"), None)),
    (r"layers/(q|k|v|gate|up)/kernel$", PartitionSpec(None, None, ("tensor", "fsdp"))),
    (r"layers/(q|k|v)/bias$", PartitionSpec(None, ("tensor", "fsdp"))),
    (r"layers/(o|down)/kernel$", PartitionSpec(None, ("tensor", "fsdp"), None)),
)

_log = logging.getLogger(__name__)


def path_name(path) -> str:
    """A key path of `jax.tree_util` as `a/b/c`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Partition of the leaf at `path`; an axis that does not divide its dimension stays whole there, and is logged."""
    rule = next((spec for pattern, spec in RULES if re.search(pattern, path)), PartitionSpec())
    if len(rule) > len(shape):
        return PartitionSpec()
    fitted = []
    for size, axes in zip(shape, rule):
        kept = []
        for axis in () if axes is None else axes:
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
