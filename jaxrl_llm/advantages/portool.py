"""PORTool: steps of a tree of tool calls, scored by their outcomes and compared at forks (arXiv 2510.26020)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked, segments
from jaxrl_llm.tools import registry


def step_scores(rewards_PG: Array, format_PGS: Array, node_PMM: Array, real_PGS: Array, *, gamma: float, agg: str) -> Array:
    """[P, G * S]: `R(s) = agg over the trajectories k through s of gamma^(T_k - t) r_k + format_k(s)`, t = 1.. in k.

    `node_PMM` bool[P, G * S, G * S]: two entries are copies of one node. `agg` is "max" or "mean".
    """
    position = jnp.arange(1, real_PGS.shape[-1] + 1)[None, None]
    to_go = jnp.sum(real_PGS, axis=-1, keepdims=True, dtype=jnp.int32) - position
    through = gamma ** jnp.maximum(to_go, 0) * rewards_PG[..., None] + format_PGS
    through = jnp.where(real_PGS, through, 0).reshape(node_PMM.shape[:2])
    if agg == "mean":
        return segments.mean(through, node_PMM)
    best = masked.max(jnp.broadcast_to(through[:, None, :], node_PMM.shape), node_PMM, axis=-1, initial=-jnp.inf)
    return jnp.where(real_PGS.reshape(best.shape), best, 0)


@estimator
def portool(*, gamma: float = 0.95, traj_coef: float = 1.0, fork_coef: float = 1.0, agg: str = "max",
            eps: float = 1e-6) -> Estimator:
    """`A = traj_coef * A_traj + fork_coef * A_fork` for complete trajectories on the G axis.

    A_fork is the z-score (sample std) of `step_scores` over the children of one parent, each child once; first steps
    are the children of the prompt, an only child gets 0. A_traj is the z-score over the trajectories of `r` plus the mean
    format score of their steps. Copies of a shared step carry their own trajectory's A_traj.
    Reconstructed: the maximum in the score, the statistics of both z-scores and their weights of 1. gamma is the
    paper's best, eps as in `grpo`.
    `rewards` [P, G]: +1 right, -1 wrong, 0 unanswerable. `step_ids` i32[P, G, T]: step of a token from 0. Extras:
    `path` i32[P, G, S], node numbers of the steps, equal where trajectories share a step, -1 after the last;
    `format_rewards` f32[P, G, T], each step's format score on one of its trained tokens, at most gamma^S / 2 in size
    so that it cannot outweigh the outcome.
    """
    registry.one_of("agg", agg, ("max", "mean"))

    def advantages(rollouts):
        path, steps = rollouts.extras["path"], rollouts.step_ids
        p, g, s = path.shape
        real = (path >= 0) & rollouts.valid[..., None]
        inside = steps[..., None] == jnp.arange(s)[None, None, None]
        per_token = rollouts.extras["format_rewards"][..., None]
        form = jnp.where(real, jnp.sum(jnp.where(inside, per_token, 0), axis=2), 0)

        parent = jnp.pad(path, ((0, 0), (0, 0), (1, 0)), constant_values=-1)[..., :-1]
        entry, node_id, parent_id = (x.reshape(p, g * s) for x in (real, path, parent))
        node = segments.same(entry, node_id)
        scores = step_scores(rollouts.rewards, form, node, real, gamma=gamma, agg=agg)
        fork = segments.relative(scores, segments.once(segments.same(entry, parent_id), node), eps=eps)
        whole = group_z_score(rollouts.rewards + masked.mean(form, real, axis=-1), rollouts.valid, eps=eps)

        per_step = jnp.where(real, traj_coef * whole[..., None] + fork_coef * fork.reshape(p, g, s), 0)
        known = (steps >= 0) & (steps < s)
        return jnp.where(known, jnp.take_along_axis(per_step, steps, axis=-1, mode="clip"), 0)

    return stateless(advantages, needs=("rewards", "step_ids", "path", "format_rewards"))
