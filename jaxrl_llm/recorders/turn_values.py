"""The values of a critic of turns, which is trained beside the policy."""
from collections.abc import Callable

import jax

from jaxrl_llm.recorders.base import Context, Recorder, recorder
from jaxrl_llm.values import turn_critic
from jaxrl_llm.values.turn_critic import TurnCritic

NAMES = ("turn_q", "turn_v", "turn_states")


def turn_values(critic: TurnCritic, predict: Callable, fit: Callable) -> Recorder:
    """`turn_q`, `turn_v` f32[P, G, K, 2] and the `turn_states` that they are read from.

    `predict(own params, policy params, lora, rollouts)` and `fit(own, rollouts)` are compiled from `critic`.
    """
    def record(own, params, lora, rollouts):
        return predict(own.params, params, lora, rollouts)

    return Recorder("turn_critic", NAMES, record, init=critic.init,
                    fit=lambda own, policy, part: fit(own, part), updates=critic.epochs)


@recorder("turn_critic", provides=NAMES, needs=("estimator.turn_critic",))
def of_run(context: Context) -> Recorder:
    """The critic of turns with the numbers of the estimator."""
    c, policy, numbers = context.config, context.policy, context.estimator.turn_critic
    critic = TurnCritic(policy.model, context.optimizer(c.critic.learning_rate, numbers.epochs),
                        jax.random.fold_in(jax.random.key(c.seed), 6), clip_norm=c.optimizer.clip_norm or None,
                        mesh=policy.mesh, **numbers._asdict())

    def predict(own, params, lora, rollouts):
        states = critic.states(params, lora, rollouts)
        return dict(zip(NAMES, turn_critic.values(own, states))) | {"turn_states": states}

    return turn_values(critic, context.guarded("values of turns", jax.jit(predict)),
                       context.guarded("update of the critic", jax.jit(critic.fit, donate_argnums=0)))
