"""SALT: turns that several trajectories share get their mean advantage, diverging turns keep their own (2510.20022)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import segments
from jaxrl_llm.tools import registry


def edges(valid_PG: Array, traj_PG: Array, step_PG: Array, obs_PG: Array, act_PG: Array, next_PG: Array | None,
          history: int) -> Array:
    """bool[P, G, G]: pairs of turns that are one edge of the trajectory graph.

    They agree in observation, action, next observation (if given) and in the last `history` pairs of observation and
    action; a history shortened by the start of the episode equals only histories of the same length.
    """
    before, has_before = segments.previous(valid_PG, traj_PG, step_PG)
    edge = segments.same(valid_PG, obs_PG, act_PG, *(() if next_PG is None else (next_PG,)))
    past, known = [obs_PG, act_PG], valid_PG
    for _ in range(history):
        known = has_before & jnp.take_along_axis(known, before, axis=1)
        past = [jnp.take_along_axis(x, before, axis=1) for x in past]
        edge &= segments.same(valid_PG, known, *(jnp.where(known, x, 0) for x in past))
    return edge


@estimator
def salt(*, base: str = "grpo", history: int = 1, use_next: bool = True, eps: float = 1e-6) -> Estimator:
    """A turn's advantage is the mean of its trajectories' advantages over all turns that are the same `edges`.

    The trajectory advantage compares `rewards` (of the episode, repeated on its turns) inside the task: `base="grpo"`
    `(r - mean) / (sample std + eps)` or `"rloo"` `r - mean of the other trajectories`. An edge that all trajectories take
    gets 0, an edge of successful ones only keeps their advantage; sums inside an edge are conserved.
    Reconstructed from the paper's text: the equality of turns and the plain mean are our reading, `history=1` is our choice;
    eps as in `grpo`.
    Extras i32[P, G]: `traj`, `step`, `obs`, `act` (hash of the parsed action, not of the reasoning) and, with
    `use_next`, `next_obs`.
    """
    registry.one_of("base", base, ("grpo", "rloo"))

    def advantages(rollouts):
        valid, extras = rollouts.valid, rollouts.extras
        score, task = segments.by_trajectory(rollouts.rewards, valid, extras["traj"])
        if base == "grpo":
            trajectory = segments.relative(score, task, eps=eps)
        else:
            n = segments.count(task)
            trajectory = segments.relative(score, task, mode="mean_norm") * n / jnp.maximum(n - 1, 1)
        following = extras["next_obs"] if use_next else None
        ids = (extras[name] for name in ("traj", "step", "obs", "act"))
        return segments.mean(trajectory, edges(valid, *ids, following, history))

    needs = ("rewards", "traj", "step", "obs", "act")
    return stateless(advantages, needs=(*needs, "next_obs") if use_next else needs)
