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

    Chosen while a program is traced, so that programs for CPUs hold nothing of other platforms.
    """
    return of_platform(jax.default_backend()) if kernels == "auto" else kernels


def is_placed() -> bool:
    """Whether it is known on which device each part of what is traced is computed: on the only one, or by hand on a mesh.

    Otherwise the compiler may have to cut it, which it cannot do to a kernel for TPUs.
    """
    return jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty


def by_hand(f: Callable, arrays: tuple, specs: tuple, out_specs):
    """`f(*arrays)`, each device with its part by hand along the axes of a mesh that are left to the compiler.

    The compiler, which cuts everything else, does not cut kernels of accelerators.
    """
    left = set(automatic_axes())
    if not left:
        return f(*arrays)
    return jax.shard_map(f, axis_names=left, in_specs=specs, out_specs=out_specs, check_vma=False)(*arrays)


def automatic_axes() -> dict[str, int]:
    """The axes of the mesh that computations are traced for over which the compiler spreads them, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}
