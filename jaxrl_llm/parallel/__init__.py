"""Meshes and the one table that says how every array lies on them."""
from jaxrl_llm.parallel.mesh import batch_sharding, check_batch, make_mesh, mesh_sizes, replicated
from jaxrl_llm.parallel.rules import tree_shardings

__all__ = ["batch_sharding", "check_batch", "make_mesh", "mesh_sizes", "replicated", "tree_shardings"]
