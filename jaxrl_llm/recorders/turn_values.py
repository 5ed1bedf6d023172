"""The values of a critic of turns, which is trained beside the policy."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Recorder
from jaxrl_llm.values.turn_critic import TurnCritic


def turn_values(critic: TurnCritic, predict: Callable, fit: Callable) -> Recorder:
    """`turn_q`, `turn_v` f32[P, G, K, 2] and the `turn_states` that they are read from.

    `predict(own params, policy params, lora, rollouts)` and `fit(own, rollouts)` are compiled from `critic`.
    """
    def record(own, params, lora, rollouts):
        return predict(own.params, params, lora, rollouts)

    return Recorder("turn_critic", ("turn_q", "turn_v", "turn_states"), record, init=critic.init,
                    fit=lambda own, policy, part: fit(own, part))
