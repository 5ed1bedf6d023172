"""Rank-GRPO: the tokens of one item of a ranked list share their geometric-mean ratio (arXiv 2510.20150)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry


def _bins(rollouts: Rollouts) -> tuple[Array, Array]:
    """Rank of each token, with all surplus items in bin K, i32[P, G, T]; bool[P, G, T, K + 1]: membership."""
    size = rollouts.extras["hits"].shape[-1]
    ranks = jnp.minimum(rollouts.extras["ranks"], size)
    return ranks, (ranks[..., None] == jnp.arange(size + 1)[None, None, None]) & rollouts.token_mask[..., None]


def _gather(x_PGK: Array, ranks_PGT: Array) -> Array:
    return jnp.take_along_axis(x_PGK, ranks_PGT, axis=-1, mode="clip")


@objective
def rank_grpo(*, clip_low: float = 0.06, clip_high: float = 0.08, aggregation: str = "token_mean") -> Objective:
    """`l_t = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`, `rho = exp(mean over the item)`.

    The mean of the log-ratio is over the tokens of the token's own rank; surplus items form one more rank. Tokens with
    rank -1 are not in the loss, except a stop token, which counts with its own ratio: after an empty list it carries
    the penalty for stopping early. `aggregation`: `token_mean` (published code), or `rank_mean`: mean inside the item,
    over the ranks of the list, over the rollouts, without stop tokens and surplus items (our reading of the paper).
    Extras as in the estimator `rank_grpo`: `hits` (only K), `ranks`, `eos`. The numbers are those of the
    published code, which has a term `kl(0.001)`.
    """
    registry.one_of("aggregation", aggregation, ("token_mean", "rank_mean"))

    def weights(rollouts):
        ranks, member = _bins(rollouts)
        if aggregation == "token_mean":
            real = rollouts.token_mask & ((ranks >= 0) | rollouts.extras["eos"])
            return {"loss": jnp.where(real, 1 / jnp.maximum(masked.count(real), 1), 0)}
        member = (member & ~rollouts.extras["eos"][..., None])[..., :-1]
        sizes = masked.count(member, axis=2)
        lists = masked.count(sizes > 0, axis=-1, keepdims=True)
        per_token = sizes * lists * masked.count(lists > 0)
        share = 1 / jnp.maximum(_gather(per_token, ranks), 1)
        return {"loss": jnp.where(jnp.any(member, axis=-1), share, 0)}

    def token_loss(logprobs, rollouts, advantages):
        ranks, member = _bins(rollouts)
        per_token = log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        per_item = masked.mean(jnp.broadcast_to(per_token[..., None], member.shape), member, axis=2)
        alone = jnp.where(rollouts.extras["eos"], per_token, 0)
        ratio = jnp.exp(jnp.where(ranks >= 0, _gather(per_item, ranks), alone))
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        return loss, {"clip_fraction": clipped, "max/ratio": ratio, "approx_kl": -per_token}

    return token_objective(token_loss, needs=("hits", "ranks", "eos"), extra_weights=weights, reads_old=True)
