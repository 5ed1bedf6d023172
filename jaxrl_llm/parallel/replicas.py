"""The sampler's layout of the devices: groups over `tensor`, each with all weights, and the part of them in this process."""
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxrl_llm.parallel.mesh import MESH_AXES, mesh_shape
from jaxrl_llm.parallel.rules import rollout_shardings


def sampler_mesh(mesh: Mesh, tensor: int = 0) -> Mesh:
    """The devices of a learner's mesh, in their order, as replicas of `tensor` devices; 0, or that of the mesh: the mesh itself.

    Raises ValueError for a number that does not divide that of the devices.
    """
    if not tensor or tensor == mesh.shape["tensor"]:
        return mesh
    if tensor < 0 or mesh.size % tensor:
        raise ValueError(f"sampling.tensor={tensor} does not divide the {mesh.size} devices of the mesh: a replica of the "
                         f"sampler is that many of them; give a divisor of {mesh.size}, or 0 for mesh.tensor")
    return _of(mesh.devices, tensor)


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


def laid_here(tree, mesh: Mesh):
    """Arrays in the layout of `rollout_shardings` as arrays on the replicas of one process, `mesh`. Nothing is copied or sent.

    Device arrays that the process has whole are returned as they are.
    """
    def lay(leaf, sharding: NamedSharding):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        parts = {shard.device: shard.data for shard in leaf.addressable_shards}
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [parts[device] for device in mesh.devices.flat])

    return jax.tree.map(lay, tree, rollout_shardings(tree, mesh))
