"""MARS^2: nodes of a search tree are rewarded for improving on their parent and siblings (arXiv 2604.14564)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import segments, trees
from jaxrl_llm.rewards.length import soft_overlong
from jaxrl_llm.tools import registry


def shaped_rewards(rewards_PG: Array, node_PG: Array, parent_PG: Array, valid_PG: Array, *, gamma: float = 0.5,
                   mix: float = 0.5, parent_reward: str = "shaped") -> Array:
    """[P, G]: `r + gamma * (r - b)`, `b = (1 - mix) * parent + mix * mean of the siblings' r`.

    `parent` is the parent's shaped (or "raw") reward. If one of the two is absent, b is the other; if both are, the
    result is r.
    """
    children = trees.children(valid_PG, node_PG, parent_PG)
    others = segments.same(valid_PG, parent_PG) & ~jnp.eye(valid_PG.shape[-1], dtype=bool)[None]
    siblings, has_siblings = segments.mean(rewards_PG, others), jnp.any(others, axis=-1)
    from_parent, has_parent = jnp.swapaxes(children, 1, 2), jnp.any(children, axis=1)

    def shape(parents_PG):
        parent = segments.total(parents_PG, from_parent)
        both = parent + mix * (siblings - parent)  # exact where the two are equal
        baseline = jnp.where(has_parent, jnp.where(has_siblings, both, parent), siblings)
        return rewards_PG + jnp.where(has_parent | has_siblings, gamma * (rewards_PG - baseline), 0)

    if parent_reward == "raw":
        return shape(rewards_PG)
    # Every pass completes one more depth of the tree.
    return lax.fori_loop(0, valid_PG.shape[-1], lambda _, shaped: shape(shaped), rewards_PG)


@estimator
def mars2_path_adv(*, gamma: float = 0.5, mix: float = 0.5, parent_reward: str = "shaped", max_len: int = 32768,
                   cache_len: int | None = None, factor: float = 1.0, eps: float = 1e-9) -> Estimator:
    """`A = (s - mean) / (sample std + eps)` over all nodes of the tree, whichever agent made them.

    `s` is the `shaped_rewards` plus the penalty of nodes with more than `max_len - cache_len` tokens, down to `-factor` at
    `max_len` (`rewards.length.soft_overlong`); `cache_len` is a sixteenth of `max_len` by default. Rows are nodes: candidate
    solutions that refine their parent's. An all-equal tree gets 0. The numbers are those of the published code's class and
    scripts; its function has gamma 0.3. `rewards` [P, G]: raw scores in [0, 1]. Extras i32[P, G]: `node`, `parent` (-1 = direct
    answer to the prompt). Raises ValueError for another `parent_reward`, and unless 0 < cache_len <= max_len.
    """
    registry.one_of("parent_reward", parent_reward, ("shaped", "raw"))
    penalty = soft_overlong(max_len, max(max_len // 16, 1) if cache_len is None else cache_len, factor)

    def advantages(rollouts):
        tree = (rollouts.extras["node"], rollouts.extras["parent"], rollouts.valid)
        shaped = shaped_rewards(rollouts.rewards, *tree, gamma=gamma, mix=mix, parent_reward=parent_reward)
        return group_z_score(shaped + penalty(rollouts.lengths), rollouts.valid, eps=eps)

    return stateless(advantages, needs=("rewards", "node", "parent"))
