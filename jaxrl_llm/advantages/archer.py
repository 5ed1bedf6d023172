"""ArCHer's advantage of a turn, from twin values of turns and of states (arXiv 2402.19446)."""
from jaxrl_llm.advantages.base import Estimator, OfTurns, estimator, stateless


@estimator
def archer(*, gamma: float = 0.95, tau: float = 0.1, critic_epochs: int = 50) -> Estimator:
    """`A = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s)`, rows are turns with `extras["turn_q"]`, `extras["turn_v"]` f32[P, G, 2].

    `gamma` (discount per turn), `tau` (rate of the slow copies) and `critic_epochs` (passes over a batch) configure the critic
    behind these values, `values.turn_critic`; the defaults are the official code's. Raises ValueError for numbers outside
    their ranges.
    """
    if not 0 <= gamma <= 1 or not 0 < tau <= 1 or critic_epochs < 1:
        raise ValueError(f"gamma={gamma}, tau={tau}, critic_epochs={critic_epochs}; need shares from 0 to 1, tau above 0, and "
                         "one epoch at least")

    def advantages(rollouts):
        return rollouts.extras["turn_q"].min(-1) - rollouts.extras["turn_v"].min(-1)

    built = stateless(advantages, needs=("turn_q", "turn_v", "step", "step_rewards"))
    return built._replace(turn_critic=OfTurns(gamma, tau, critic_epochs))
