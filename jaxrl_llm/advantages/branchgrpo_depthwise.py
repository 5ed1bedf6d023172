"""BranchGRPO: leaf rewards flow up a tree of segments, which are compared at equal depth (arXiv 2509.06040)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked, segments, trees
from jaxrl_llm.tools import registry

VARIANTS = ("mean", "prob", "use_group")


def path_values(rewards_PG: Array, edge_PG: Array, valid_PG: Array, parent_PG: Array, below_PGG: Array,
                leaf_PG: Array) -> Array:
    """[P, G]: `v = sum over children c of softmax(edge)_c v_c`, at a leaf its reward; `edge` is a log-prob."""
    siblings = segments.same(valid_PG, parent_PG)
    among = jnp.broadcast_to(edge_PG[:, None, :], siblings.shape)
    share = edge_PG - jax.nn.logsumexp(jnp.where(siblings, among, -jnp.inf), axis=-1)
    share = jnp.where(valid_PG, share, 0)
    # The products of softmax weights along a path turn the recursion into one weighted sum over the leaves below.
    path = masked.sum(jnp.broadcast_to(share[:, :, None], below_PGG.shape), below_PGG, axis=1)
    leaves = below_PGG & leaf_PG[:, None, :]
    weight = jnp.exp(jnp.where(leaves, path[:, None, :] - path[:, :, None], -jnp.inf))
    return jnp.sum(weight * jnp.where(leaf_PG, rewards_PG, 0)[:, None, :], axis=-1)


@estimator
def branchgrpo_depthwise(*, variant: str = "mean", max_advantage: float = 5.0, min_std: float = 1e-6,
                         eps: float = 1e-8) -> Estimator:
    """`A = clip((v - mean) / (sample std + eps), -max_advantage, max_advantage)` over the tree's rows of equal depth.

    Rows are the segments of a tree that starts at the prompt, each shared segment once. `variant` defines v:
      `mean`       mean reward of the leaves at or below the row
      `prob`       sum over the children of softmax(mean token log-prob of the child) * v of the child
      `use_group`  no v: the leaves' z-score in the prompt, each row the mean over the leaves at or below it
    A is 0 where the std is below `min_std` or a depth has one row. A leaf takes part in its own depth only.
    The paper's tree of diffusion steps is adapted to segments of text; the mean log-prob (the sum is too peaked) and the
    average in `use_group` are part of this adaptation. The numbers are the published code's.
    `rewards` [P, G]: read at leaves only. Extras i32[P, G]: `node`, `parent` (see `jaxrl_llm.maths.trees`); `prob` reads
    `old_logprobs`.
    """
    registry.one_of("variant", variant, VARIANTS)

    def advantages(rollouts):
        valid, rewards, parent = rollouts.valid, rollouts.rewards, rollouts.extras["parent"]
        children = trees.children(valid, rollouts.extras["node"], parent)
        below = trees.descendants(children, valid)
        leaf = valid & ~jnp.any(children, axis=-1)
        if variant == "use_group":
            score = segments.relative(rewards, segments.same(leaf), eps=eps)
            return jnp.clip(segments.mean(score, below & leaf[:, None, :]), -max_advantage, max_advantage)
        if variant == "mean":
            value = segments.mean(rewards, below & leaf[:, None, :])
        else:
            edge = masked.mean(rollouts.old_logprobs, rollouts.token_mask, axis=-1)
            value = path_values(rewards, edge, valid, parent, below, leaf)
        level = segments.same(valid, trees.depth(below))
        score = jnp.clip(segments.relative(value, level, eps=eps), -max_advantage, max_advantage)
        return jnp.where(segments.std(value, level, ddof=1) < min_std, 0, score)

    needs = ("rewards", "node", "parent")
    return stateless(advantages, needs=(*needs, "old_logprobs") if variant == "prob" else needs)
