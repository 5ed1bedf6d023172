"""Meshes, and the one partition table that says how every array is sharded over them."""
from jaxrl_llm.parallel.fsdp import over_rows
from jaxrl_llm.parallel.mesh import batch_sharding, check_batch, make_mesh, mesh_sizes, replicated, rows_sharding, shards_of
from jaxrl_llm.parallel.replicas import apart, by_process, check_heads, laid_on, local_mesh, reshard, sampler_mesh
from jaxrl_llm.parallel.rules import rollout_shardings, tree_shardings, with_shardings
from jaxrl_llm.parallel.runtime import (
    agree,
    barrier,
    check_same,
    fetch,
    first,
    gather,
    gather_objects,
    is_primary,
    put,
    several,
)

__all__ = ["agree", "apart", "barrier", "batch_sharding", "by_process", "check_batch", "check_heads", "check_same", "fetch",
           "first", "gather", "gather_objects", "is_primary", "laid_on", "local_mesh", "make_mesh", "mesh_sizes", "over_rows",
           "put", "replicated", "reshard", "rollout_shardings", "rows_sharding", "sampler_mesh", "several", "shards_of",
           "tree_shardings", "with_shardings"]
