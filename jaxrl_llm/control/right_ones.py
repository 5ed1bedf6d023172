"""RAFT: some right rollouts of each prompt are learned from, and no other (arXiv 2304.06767)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.tools import registry


@prompt_filter
def right_ones(*, most: int = 1, by: str = "shortest") -> Filter:
    """At most `most` right rollouts of each prompt, of equal texts the first; a prompt without a right one gives none.

    `by`: "shortest", those with the fewest trained tokens, of equal ones the first; "first", those that were drawn first, which
    is a random choice. Right is `Rollouts.correct`. Raises ValueError for fewer than one.
    """
    registry.one_of("choice among right rollouts", by, ("shortest", "first"))
    if most < 1:
        raise ValueError(f"most={most}; give the number of right rollouts of a prompt that are learned from, 1 or more")

    def keep(rollouts):
        right = first_of_equals(rollouts.tokens, rollouts.token_mask, rollouts.correct & rollouts.live)
        size = rollouts.lengths if by == "shortest" else jnp.zeros_like(rollouts.lengths)
        before = (size[:, None] < size[..., None]) | (size[:, None] == size[..., None]) & _earlier(size.shape[1])
        return right & (jnp.sum(before & right[:, None], axis=2) < most)

    return Filter(keep, needs=("rewards", "tokens"), per="rollout")


def first_of_equals(tokens: Array, mask: Array, among: Array) -> Array:
    """bool[P, G]: of the rollouts `among` bool[P, G], those whose trained tokens no earlier one of their prompt has."""
    said = jnp.where(mask, tokens, -1)
    equal = jnp.all(said[:, :, None] == said[:, None], axis=3)
    return among & ~jnp.any(equal & among[:, None] & _earlier(among.shape[1]), axis=2)


def _earlier(size: int) -> Array:
    """bool[1, G, G], whether rollout j comes before rollout i, at [0, i, j]."""
    return jnp.tril(jnp.ones((size, size), bool), -1)[None]
