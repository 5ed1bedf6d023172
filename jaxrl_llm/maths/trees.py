"""One tree of rows per prompt, from node ids: `matrix[p, i, j]` relates row i to row j.

`node` i32[P, G] numbers the rows of a prompt in any order, `parent` i32[P, G] is the number of the row that a row
continues, -1 if it starts at the prompt. A row whose parent is not among the valid rows also counts as starting at the prompt.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths.segments import same


def children(valid_PG: Array, node_PG: Array, parent_PG: Array) -> Array:
    """bool[P, G, G]: row j is a child of row i."""
    return same(valid_PG) & (node_PG[:, :, None] == parent_PG[:, None, :])


def descendants(children_PGG: Array, valid_PG: Array) -> Array:
    """bool[P, G, G]: row j is row i itself or one of its descendants."""
    size = children_PGG.shape[-1]
    reach = children_PGG | (jnp.eye(size, dtype=bool)[None] & valid_PG[:, :, None])
    for _ in range((size - 1).bit_length()):  # each squaring doubles the length of the paths
        reach = jnp.matmul(reach.astype(jnp.float32), reach.astype(jnp.float32)) > 0
    return reach


def depth(descendants_PGG: Array) -> Array:
    """i32[P, G]: number of rows on the path from the prompt to the row, itself included; 0 on padding."""
    return jnp.sum(descendants_PGG, axis=1, dtype=jnp.int32)
