"""One mesh with named axes; a laptop is a mesh of one."""
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")  # their sizes are always given
# All axes that rules may name; `seq` is given only if it is more than 1, and `expert` has size 1 until something is sharded
# over it. Neighbours along the last axis are nearest to each other.
MESH_AXES = ("data", "fsdp", "seq", "expert", "tensor")


def mesh_sizes(count: int, data: int = -1, fsdp: int = 1, tensor: int = 1, seq: int = 1) -> dict[str, int]:
    """The axes of a mesh of `count` devices; one size may be -1 (the rest). `seq` is omitted if it is 1.

    Raises ValueError: when the sizes do not multiply to the number of devices.
    """
    sizes = [data, fsdp, tensor, seq]
    known = int(np.prod([n for n in sizes if n != -1]))
    fits = all(n >= 1 for n in sizes if n != -1)
    if sizes.count(-1) > 1 or not fits or count % known or (-1 not in sizes and known != count):
        cut = "" if seq == 1 else f" x seq={seq}"
        raise ValueError(f"mesh data={data} x fsdp={fsdp} x tensor={tensor}{cut} does not fit {count} devices: "
                         "the sizes must multiply to that number; one of them may be -1")
    by_axis = {axis: count // known if n == -1 else n for axis, n in zip((*AXES, "seq"), sizes)}
    return {axis: n for axis, n in by_axis.items() if axis in AXES or n > 1}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, seq: int = 1, devices=None) -> Mesh:
    """A mesh over all devices with the axes `MESH_AXES`, see `mesh_sizes`."""
    devices = jax.devices() if devices is None else devices
    laid = lay_out(mesh_shape(mesh_sizes(len(devices), data, fsdp, tensor, seq)), devices)
    return Mesh(laid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def lay_out(shape: tuple[int, ...], devices) -> np.ndarray:
    """The devices as an array of this shape. TPU slices, joined by a slower network, are spread along the first axis only.

    Raises ValueError: the first axis does not divide by the number of slices.
    """
    slices = len({device.slice_index for device in devices}) if devices[0].platform == "tpu" else 1
    if shape[0] % slices:
        raise ValueError(f"mesh data={shape[0]} does not divide by {slices} TPU slices: between slices there is only data; "
                         f"use {slices} or a multiple of it")
    # An axis may take part of a side of a TPU slice: otherwise most sizes fit few slices.
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh((shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:])), devices,
                                                allow_split_physical_axes=True)


def mesh_shape(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of `MESH_AXES`: those given, else 1."""
    return tuple(sizes.get(axis, 1) for axis in MESH_AXES)


def shards_of(mesh: Mapping[str, int]) -> int:
    """The number of shards of prompts on a mesh of these sizes."""
    return mesh["data"] * mesh["fsdp"] * mesh.get("seq", 1)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Prompts (the leading axis) sharded over `data`, `fsdp` and, if it is more than 1, `seq`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp", *_seq(mesh))))


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Packed rows `[R, N]`: rows sharded over `data` and `fsdp`, slots over `seq`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), *_seq(mesh)))


def _seq(mesh: Mesh) -> tuple[str, ...]:
    """`seq` if the mesh has it, so that programs of other meshes do not change."""
    return ("seq",) if mesh.shape.get("seq", 1) > 1 else ()


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(mesh: Mesh, count: int, what: str, kind: str = "prompts") -> None:
    """Raises ValueError when `count` prompts, or rows, cannot be sharded evenly over the mesh; `what` names their number."""
    seq = mesh.shape.get("seq", 1) if kind == "prompts" else 1
    shards, more = mesh.shape["data"] * mesh.shape["fsdp"] * seq, (" x seq", f" x {seq}") if seq > 1 else ("", "")
    if count % shards:
        below, above = count // shards * shards, (count // shards + 1) * shards
        raise ValueError(f"{what}={count} {kind} do not divide over the mesh's data x fsdp{more[0]} = "
                         f"{mesh.shape['data']} x {mesh.shape['fsdp']}{more[1]} = {shards} shards; "
                         f"use {above}{f' or {below}' if below else ''}, or a smaller mesh")
