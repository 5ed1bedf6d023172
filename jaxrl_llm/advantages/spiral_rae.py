"""SPIRAL: in zero-sum self-play every role of every game keeps its own moving-average baseline (arXiv 2506.24119)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateful
from jaxrl_llm.advantages.selection import over_kept
from jaxrl_llm.maths import masked, segments


@estimator
def spiral_rae(*, games: int = 1, decay: float = 0.95, gamma: float = 1.0, update_first: bool = False,
               filter_zero: bool = True) -> Estimator:
    """`A = R - b`, then `b <- decay b + (1 - decay) R`, per game and role; the i-th of n turns gets `gamma^(n-1-i) A`.

    The P axis holds games in order of arrival, the G axis the turns of both roles. The state b is
    f32[games, 2], one tracker for all actors, and starts at 0. `update_first` updates the baseline before its use, as
    the paper's listing may be read. `filter_zero` excludes turns with an advantage of exactly 0 from the loss and,
    under the aggregation `token_mean`, from its denominator. A role that never moved is assumed to have the negative of
    the other's reward, which holds in zero-sum games only. A game that is not settled, such as one that was cut at a
    limit of turns, has no outcome: it changes no baseline, and its turns are excluded from the loss in the same way as
    zeros. decay and gamma are the published code's.
    `rewards` [P, G]: the outcome for the role of the row. Extras: `game` i32[P] in 0..games-1, `settled` bool[P],
    `agent` i32[P, G] in {0, 1}, the role, `step` i32[P, G] (order of the turns).
    """

    def advantages(rollouts, baseline):
        valid, extras, settled = rollouts.valid, rollouts.extras, rollouts.extras["settled"]
        roles = (extras["agent"][..., None] == jnp.arange(2)[None, None]) & valid[..., None]
        moved = jnp.any(roles, axis=1)
        outcome = masked.mean(jnp.broadcast_to(rollouts.rewards[..., None], roles.shape), roles, axis=1)
        outcome = jnp.where(moved, outcome, -outcome[:, ::-1]).astype(baseline.dtype)

        def finish(baseline, played):
            game, outcome, real = played
            before = baseline[game]
            after = decay * before + (1 - decay) * outcome
            return baseline.at[game].set(jnp.where(real, after, before)), outcome - (after if update_first else before)

        baseline, scores = lax.scan(finish, baseline, (extras["game"], outcome, jnp.any(moved, axis=1) & settled))
        later = extras["step"][:, None, :] > extras["step"][:, :, None]
        remaining = segments.count(segments.same(valid, extras["agent"]) & later)
        turns = jnp.take_along_axis(scores, extras["agent"], axis=1, mode="clip") * gamma**remaining
        tokens = masked.to_tokens(turns, rollouts.token_mask)
        kept = settled[:, None, None] & ((tokens != 0) if filter_zero else rollouts.token_mask)
        return over_kept(tokens, kept, rollouts.token_mask), baseline

    return stateful(lambda: jnp.zeros((games, 2)), advantages, needs=("rewards", "game", "settled", "agent", "step"))
