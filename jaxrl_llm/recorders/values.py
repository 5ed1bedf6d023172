"""The values of a critic, which is trained beside the policy."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Recorder
from jaxrl_llm.values.critic import Critic


def values(critic: Critic, predict: Callable, fit: Callable) -> Recorder:
    """`values` f32[P, G, T]: `predict` and `fit` are the compiled `Critic.values` and `values.critic.make_update`."""
    def record(own, params, lora, rollouts):
        return {"values": predict(own.params, (params, lora), rollouts)}

    return Recorder("critic", ("values",), record, init=critic.init, fit=fit)
