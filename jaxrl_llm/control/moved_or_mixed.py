"""Rollouts of prompts that are solved now and then, and right ones that were written elsewhere (arXiv 2510.15979)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.maths import masked


def written_elsewhere(rollouts: Rollouts) -> Array:
    """bool[P, G], rollouts with a token of the role ELSEWHERE."""
    if rollouts.role is None:
        return rollouts.valid & False
    return (rollouts.token_mask & (rollouts.role == Role.ELSEWHERE)).any(-1)


@prompt_filter
def moved_or_mixed() -> Filter:
    """The rollouts under the prompt where some of them are right and some wrong; of those from elsewhere the right ones.

    Right is `Rollouts.correct`. Cog-Rethinker learns from the former by reinforcement, from the latter by supervision.
    """
    def keep(rollouts):
        moved, right = written_elsewhere(rollouts), rollouts.correct
        own = rollouts.valid & ~moved
        share = masked.mean(right.astype(float), own, axis=1, keepdims=True)
        return (own & (share > 0) & (share < 1)) | (moved & right)

    return Filter(keep, needs=("rewards",), per="rollout")
