"""Direct preference optimisation: of two texts behind one prompt the chosen one becomes more likely (arXiv 2305.18290)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.sft import text_weights
from jaxrl_llm.tools import registry


@objective
def dpo(*, beta: float = 0.1, kind: str = "sigmoid", smoothing: float = 0.0) -> Objective:
    """The mean over pairs of a loss of `h = beta [(sum log p - sum log p_ref) of the chosen text - the same of the rejected]`.

    Sums are over trained tokens. `kind`: `sigmoid` is `-(1 - smoothing) log sigmoid(h) - smoothing log sigmoid(-h)`; `ipo`
    (arXiv 2310.12036) is `(h / beta - 1 / (2 beta))^2` with token means in place of the sums, as in TRL.
    `extras["chosen"]` bool[P, G] names the chosen text of each prompt; a prompt whose trained texts are not exactly one chosen
    and one rejected does not count. Weights of pairs are those of their chosen texts, see `sft`. Advantages are not used. The
    likelihood of the chosen text is the term `nll(coef)`: given pairs have reward 1 on it. Defaults are those of TRL.

    Metrics, means over pairs: `preference/accuracy`, the share with h > 0; `preference/chosen` and `preference/rejected`, the
    rewards `beta (sum log p - sum log p_ref)` of both; `preference/margin`, their difference h. Raises ValueError for numbers
    outside their range.
    """
    registry.one_of("kind of a preference loss", kind, ("sigmoid", "ipo"))
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"smoothing={smoothing}; it is the share of pairs whose texts are taken to be exchanged: give at "
                         "least 0 and less than 0.5")
    if smoothing and kind == "ipo":
        raise ValueError(f"smoothing={smoothing} is of kind='sigmoid'; leave it out of kind='ipo'")

    def pair_loss(logprobs, rollouts, advantages):
        mask, (chosen, rejected) = rollouts.token_mask, sides(rollouts)
        total = masked.mean if kind == "ipo" else masked.sum
        scores = beta * total(logprobs - rollouts.ref_logprobs, mask, axis=2)
        preferred, other = (masked.sum(scores, side, axis=1, keepdims=True) for side in (chosen, rejected))
        h = preferred - other
        if kind == "ipo":
            loss = (h / beta - 1 / (2 * beta)) ** 2
        else:
            loss = (1 - smoothing) * jax.nn.softplus(-h) + smoothing * jax.nn.softplus(h)
        facts = {"accuracy": (h > 0).astype(h.dtype), "chosen": preferred, "rejected": other, "margin": h}
        loss, facts = jax.tree.map(lambda x: jnp.broadcast_to(x, scores.shape), (loss, facts))
        return {"sequence": loss}, {f"preference/{name}": x for name, x in facts.items()}

    return token_objective(pair_loss, needs=("ref_logprobs", "chosen"), shares="sequence",
                           extra_weights=lambda rollouts: {"sequence": pair_shares(rollouts)})


def sides(rollouts: Rollouts) -> tuple[Array, Array]:
    """`(chosen, rejected)` bool[P, G]: the two texts of each pair, without prompts that have other than one of each."""
    chosen = rollouts.extras["chosen"].astype(bool)
    both = rollouts.live & chosen, rollouts.live & ~chosen
    pair = (masked.count(both[0], axis=1, keepdims=True) == 1) & (masked.count(both[1], axis=1, keepdims=True) == 1)
    return both[0] & pair, both[1] & pair


def pair_shares(rollouts: Rollouts) -> Array:
    """f32[P, G], the weight of each pair in the mean over pairs, half of it on each of its texts."""
    chosen, rejected = sides(rollouts)
    weight = masked.sum(text_weights(rollouts), chosen, axis=1, keepdims=True)
    total = masked.sum(text_weights(rollouts), chosen)
    return jnp.where(chosen | rejected, weight / jnp.where(total > 0, 2 * total, 1), 0)
