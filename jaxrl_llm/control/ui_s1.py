"""UI-S1's filter: keep tasks whose rollouts already differ in their return at the first step (arXiv 2509.11543)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked, segments


def semi_online_return(step_rewards_PG: Array, match_PG: Array, valid_PG: Array, traj_PG: Array, step_PG: Array, *,
                       gamma: float = 0.5) -> Array:
    """[P, G]: `R_t = r_t + gamma * R_{t+1}`; no return passes through a step that was patched or failed (`match` False)."""
    return segments.discounted_return(step_rewards_PG, valid_PG, traj_PG, step_PG, gamma=gamma, flows_PG=match_PG.astype(bool))


def diverse_start(returns_PG: Array, step_PG: Array, valid_PG: Array, *, min_std: float = 0.3) -> Array:
    """bool[P]: population std of `returns` over the rows of step 0 above `min_std`, or a single such row."""
    start = valid_PG & (step_PG == 0)
    spread = masked.std(returns_PG, start, axis=1, ddof=0)
    return (spread > min_std) | (masked.count(start, axis=1) == 1)


@prompt_filter
def ui_s1(*, min_std: float = 0.3, gamma: float = 0.5) -> Filter:
    """`diverse_start` of the `semi_online_return` of turns.

    Extras: `step_rewards`, `step`, `match` [P, G, K] of the K turns of each rollout, -1 in `step` where there is none, and the
    trajectory `traj` i32[P, G, K] or i32[P, G]; or all of them [P, G], for rollouts that are turns.
    """
    def keep(rollouts):
        step = rollouts.extras["step"]
        beyond = (1,) * (step.ndim - 2)
        valid = rollouts.valid.reshape(rollouts.valid.shape + beyond) & (step >= 0)
        traj = rollouts.extras["traj"]
        traj = jnp.broadcast_to(traj.reshape(traj.shape + (1,) * (step.ndim - traj.ndim)), step.shape)
        rewards, match, valid, traj, step = (x.reshape(len(step), -1) for x in (
            rollouts.extras["step_rewards"], rollouts.extras["match"], valid, traj, step))
        returns = semi_online_return(rewards, match > 0, valid, traj, step, gamma=gamma)
        return diverse_start(returns, step, valid, min_std=min_std)

    return Filter(keep, needs=("step_rewards", "traj", "step", "match"))
