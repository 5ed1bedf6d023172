"""Replicas of the sampler: groups of devices over `tensor` that have all weights, and how weights get there."""
import functools
import itertools
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.parallel.mesh import MESH_AXES, mesh_shape
from jaxrl_llm.parallel.rules import PIECES, RULES, axes_of, path_name, rollout_shardings, spec_of


def sampler_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """The devices of a learner's mesh, in their order, as replicas of `tensor` devices; 0, or its own number: the mesh itself.

    Raises ValueError for a number that does not divide that of the devices, or parts an axis of the mesh unevenly.
    """
    if not tensor or tensor == mesh.shape["tensor"]:
        return mesh
    if mesh.size % tensor or _parted(mesh, tensor) is None:
        raise ValueError(f"sampling.tensor={tensor}: a replica of the sampler is that many neighbours of a mesh with the axes "
                         f"{dict(mesh.shape)}, of which it takes whole axes from the last on, and a part of another that "
                         f"divides it; give a divisor or a multiple of mesh.tensor that divides {mesh.size}, or 0")
    return _of(mesh.devices, tensor)


def by_process(mesh: Mesh) -> Mesh:
    """The mesh with its groups of `tensor` devices in the order of their processes, where none of them straddles processes.

    Neighbours on the wires of TPUs lie in turns on several hosts, and a replica of more devices takes those of one.
    """
    groups = mesh.devices.reshape(-1, mesh.shape["tensor"])
    places = [[(getattr(device, "slice_index", 0), device.process_index) for device in group] for group in groups]
    if any(len({*group}) > 1 for group in places):
        return mesh
    order = sorted(range(len(groups)), key=places.__getitem__)
    return Mesh(groups[order].reshape(mesh.devices.shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def local_mesh(mesh: Mesh) -> Mesh:
    """The replicas of a sampler's mesh in this process, all on `data`; the mesh itself if all of its devices are here.

    Raises ValueError if a replica straddles processes.
    """
    tensor, mine = mesh.shape["tensor"], jax.process_index()
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    if (owners == mine).all():
        return mesh
    groups, owners = mesh.devices.reshape(-1, tensor), owners.reshape(-1, tensor)
    if (owners != owners[:, :1]).any():
        raise ValueError(f"replicas of {tensor} devices straddle the processes of this run, each of which has "
                         f"{(owners == mine).sum()} devices, and an engine samples within a process; set sampling.tensor to a "
                         "divisor of that number")
    return _of(groups[owners[:, 0] == mine], tensor)


def _of(devices: np.ndarray, tensor: int) -> Mesh:
    shape = mesh_shape({"data": devices.size // tensor, "tensor": tensor})
    return Mesh(devices.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_heads(mesh: Mesh, heads: int, kv_heads: int) -> None:
    """Raises ValueError if the heads of a model cannot be shared out over the devices of a replica."""
    tensor = mesh.shape["tensor"]
    if heads % tensor or kv_heads % tensor:
        raise ValueError(f"a replica of {tensor} devices cannot share {heads} heads and {kv_heads} of keys and values; set "
                         f"sampling.tensor to a divisor of {np.gcd(heads, kv_heads)}")


def reshard(params, mesh: Mesh, dtype, to: Mesh | None = None):
    """The parameters in the layout of `rollout_shardings` on `to`, a `sampler_mesh` of this mesh (None: the mesh itself).

    Those that `apart` has copied, and of meshes without `fsdp` and `seq`, have it already. Other arrays of the table are cast
    to `dtype` first, as they are at use, so that no more bytes are gathered than are read. Arrays travel one after the other,
    and of each its layers: beside the result a device needs one and a half matrices of a layer, or tables of tokens.
    """
    to = mesh if to is None else to
    if to is mesh and mesh.shape["fsdp"] * mesh.shape["seq"] == 1:
        return params
    if jax.tree.all(jax.tree.map(_lies, params, rollout_shardings(params, to))):
        return params
    moved = _reshard(params, mesh, to.shape["tensor"], dtype)
    return moved if to is mesh else laid_on(moved, to)


def apart(params, mesh: Mesh, dtype, to: Mesh | None = None):
    """A copy of the parameters as `reshard` lays them out; arrays of the table, which are cast at use, in `dtype`."""
    to = mesh if to is None else to
    moved = _reshard(params, mesh, to.shape["tensor"], dtype, copied=True)
    return moved if to is mesh else laid_on(moved, to)


def laid_on(tree, mesh: Mesh):
    """The arrays of a tree, in the layout of `rollout_shardings`, as arrays on `mesh`: nothing is copied or sent.

    The mesh has all of their devices, or those of this process.
    """
    def lay(leaf, sharding: NamedSharding):
        parts = {shard.device: shard.data for shard in leaf.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            leaf.shape, sharding, [parts[device] for device in mesh.devices.flat if device in parts])

    return jax.tree.map(lay, tree, rollout_shardings(tree, mesh))


def _lies(leaf, sharding: NamedSharding) -> bool:
    return not isinstance(leaf, jax.core.Tracer) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _parted(mesh: Mesh, tensor: int) -> tuple[str, int] | None:
    """The axis of which a replica of `tensor` neighbours takes a part, and that part; None if there is no such axis."""
    inner = 1
    for name, size in zip(reversed(mesh.axis_names), reversed(mesh.devices.shape)):
        if tensor <= inner * size:
            part = tensor // inner
            return (name, part) if part * inner == tensor and size % part == 0 else None
        inner *= size
    return None


def _common(mesh: Mesh, tensor: int) -> tuple[Mesh, dict[str, tuple[str, ...]], tuple[str, ...]]:
    """`(finer, parts, within)`: a mesh of the same devices that has the replicas' axes, by the names `within`.

    `parts` has the names of its axes by those of the mesh.
    """
    if tensor == mesh.shape["tensor"]:
        return mesh, {name: (name,) for name in mesh.axis_names}, ("tensor",)
    parted = _parted(mesh, tensor)
    assert parted is not None
    axis, part = parted
    parts: dict[str, tuple[str, ...]] = {
        name: (name,) if name != axis else (f"{name}_outer", f"{name}_inner") for name in mesh.axis_names}
    sizes = {name: size for name, size in zip(mesh.axis_names, mesh.devices.shape) if name != axis} | {
        f"{axis}_outer": mesh.shape[axis] // part, f"{axis}_inner": part}
    names = [*itertools.chain(*parts.values())]
    finer = Mesh(mesh.devices.reshape([sizes[name] for name in names]), names, axis_types=(AxisType.Auto,) * len(names))
    return finer, parts, tuple(names[names.index(f"{axis}_inner"):])


def _reshard(params, mesh, tensor, dtype, copied=False):
    finer, parts, within = _common(mesh, tensor)
    sizes = {**mesh.shape, "tensor": tensor} if finer is mesh else _of(mesh.devices, tensor).shape

    def on_finer(spec, names):
        return PartitionSpec(*(tuple(itertools.chain(*(names[axis] for axis in axes_of(entry)))) or None for entry in spec))

    def move(path, leaf):
        name = path_name(path)
        train, rollout = spec_of(name, leaf.shape, mesh.shape), spec_of(name, leaf.shape, sizes, PIECES)
        listed = any(re.search(pattern, name) for pattern, _ in RULES)
        specs: tuple[PartitionSpec, ...] = (train, rollout)
        if finer is not mesh:
            specs = on_finer(train, parts), PartitionSpec(), on_finer(rollout, {"tensor": within})
        elif train == rollout:
            return _copied(leaf, NamedSharding(mesh, rollout), dtype if listed else leaf.dtype) if copied else leaf
        return _moved(leaf, finer, specs, dtype if listed else leaf.dtype, name.startswith("layers/"))

    return jax.tree.map_with_path(move, params)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copied(leaf, sharding, dtype):
    return jax.lax.with_sharding_constraint(leaf.astype(dtype).copy(), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _moved(leaf, mesh, specs, dtype, layered):
    """A leaf in `dtype`, laid out by each of these partitions in turn; `layered`: layer by layer.

    Each leaf has a program: in one of all leaves the compiler shares the first contents of results of a shape, and copies them.
    """
    if layered:
        inner = tuple(PartitionSpec(*spec[1:]) for spec in specs)
        return jax.lax.map(lambda layer: _moved(layer, mesh, inner, dtype, False), leaf)
    leaf = leaf.astype(dtype)
    for spec in specs:
        leaf = jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))
    return leaf
