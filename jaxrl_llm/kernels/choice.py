"""Which kernels compute on which platform: the one rule, as a table in docs/scaling.md."""
from collections.abc import Callable

import jax
from jax.sharding import AxisType

SETS = ("auto", "plain", "cuda", "tpu")
_OF_PLATFORM = {"tpu": "tpu", "gpu": "cuda", "cuda": "cuda"}


def of_platform(platform: str) -> str:
    """The kernels of a platform, as `jax.Device.platform` names it."""
    return _OF_PLATFORM.get(platform, "plain")


def chosen(kernels: str) -> str:
    """One of `SETS` with `auto` resolved: the kernels of the devices that this process computes on.

    The choice is made at trace time, so programs for CPUs contain nothing for other platforms.
    """
    return of_platform(jax.default_backend()) if kernels == "auto" else kernels


def is_placed() -> bool:
    """Whether each part of the traced computation has a known device: the only one, or by `shard_map` on a mesh.

    Otherwise the compiler may have to partition it, which it cannot do with a kernel for TPUs.
    """
    return jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty


def by_hand(f: Callable, arrays: tuple, specs: tuple, out_specs):
    """`f(*arrays)` under `shard_map` along the axes of a mesh that are otherwise left to the compiler.

    The compiler partitions everything else, but not the kernels of accelerators.
    """
    left = set(automatic_axes())
    if not left:
        return f(*arrays)
    return jax.shard_map(f, axis_names=left, in_specs=specs, out_specs=out_specs, check_vma=False)(*arrays)


def automatic_axes() -> dict[str, int]:
    """The axes, with their sizes, of the current mesh over which the compiler partitions computations."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}
