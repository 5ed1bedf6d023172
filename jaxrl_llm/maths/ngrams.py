"""Equal runs of tokens within a text, exact and in O(T log T log size)."""
import jax
import jax.numpy as jnp
from jax import Array, lax


def _first_equal(a_T: Array, b_T: Array) -> Array:
    """i32[T]: the first index with the same pair (a, b)."""
    index = jnp.arange(a_T.shape[0], dtype=jnp.int32)
    order = jnp.lexsort((index, b_T, a_T))
    a, b = a_T[order], b_T[order]
    begins = jnp.pad((a[1:] != a[:-1]) | (b[1:] != b[:-1]), (1, 0), constant_values=True)
    head = lax.cummax(jnp.where(begins, index, 0))
    return jnp.zeros_like(index).at[order].set(order[head].astype(jnp.int32))


def window_classes(tokens_T: Array, mask_T: Array, size: int) -> Array:
    """i32[T]: the first index at which the same `size` tokens begin, overlaps included.

    A token outside the mask equals no other token, and neither does a window with such a token. The last `size - 1` entries are
    of shorter windows. The class of a window of 2m tokens is the pair of the classes of its halves (prefix doubling).
    """
    index = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
    classes = _first_equal(jnp.where(mask_T, tokens_T, -2 - index), jnp.zeros_like(index))
    width = 1
    while width < size:
        shift = min(width, size - width)
        further = jnp.pad(classes, (0, shift), constant_values=-1)[shift:]
        classes, width = _first_equal(classes, further), width + shift
    return classes


def repeated_starts(tokens_T: Array, mask_T: Array, size: int) -> Array:
    """bool[T]: the `size` tokens of the mask from here on occurred before."""
    index = jnp.arange(tokens_T.shape[0], dtype=jnp.int32)
    return (window_classes(tokens_T, mask_T, size) != index) & (index + size <= tokens_T.shape[0])


def most_repeats(tokens_PGT: Array, mask_PGT: Array, size: int) -> Array:
    """i32[P, G]: how often the most frequent run of `size` tokens of the mask occurs in a rollout; 0 without such a run."""
    length = tokens_PGT.shape[-1]

    def of_rollout(tokens, mask):
        ends = jnp.pad(jnp.cumsum(mask, dtype=jnp.int32), (1, size))
        whole = ends[size:size + length] - ends[:length] == size
        return jnp.max(jnp.zeros(length, jnp.int32).at[window_classes(tokens, mask, size)].add(whole))

    # One prompt after the other: the sorts need a dozen arrays as large as their input.
    return lax.map(lambda rows: jax.vmap(of_rollout)(*rows), (tokens_PGT, mask_PGT))
