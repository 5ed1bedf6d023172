"""ArCHer's advantage of a turn, from twin values of turns and of states (arXiv 2402.19446)."""
import jax.numpy as jnp

from jaxrl_llm.advantages.base import Estimator, OfTurns, estimator, stateless


@estimator
def archer(*, gamma: float = 0.95, tau: float = 0.1, critic_epochs: int = 50, baseline: bool = False) -> Estimator:
    """`A = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s)`, rows are turns with `extras["turn_q"]`, `extras["turn_v"]` f32[P, G, 2].

    `gamma` (discount per turn), `tau` (rate of the slow copies) and `critic_epochs` (passes over a batch) configure the critic
    behind these values, `values.turn_critic`; the defaults are the official code's. With `baseline` the advantage of a token is
    A - v_t: v, `extras["values"]` f32[P, G, T], is fitted to A on the tokens of each turn. Raises ValueError for numbers
    outside their ranges.
    """
    if not 0 <= gamma <= 1 or not 0 < tau <= 1 or critic_epochs < 1:
        raise ValueError(f"gamma={gamma}, tau={tau}, critic_epochs={critic_epochs}; need shares from 0 to 1, tau above 0, and "
                         "one epoch at least")

    def advantages(rollouts):
        return rollouts.extras["turn_q"].min(-1) - rollouts.extras["turn_v"].min(-1)

    def of_tokens(rollouts):
        return advantages(rollouts)[..., None] - rollouts.extras["values"]

    def targets(rollouts, monte_carlo):
        return jnp.where(rollouts.token_mask, advantages(rollouts)[..., None], 0)

    needs = "turn_q", "turn_v", "step", "step_rewards"
    built = (stateless(of_tokens, needs=(*needs, "values"), value_targets=targets) if baseline
             else stateless(advantages, needs=needs))
    return built._replace(turn_critic=OfTurns(gamma, tau, critic_epochs))
