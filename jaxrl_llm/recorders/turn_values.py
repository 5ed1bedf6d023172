"""The values of a critic of turns, which is trained beside the policy."""
from collections.abc import Callable

import jax

from jaxrl_llm.data.packing import MAX_LENGTHS
from jaxrl_llm.recorders.base import Context, Recorder, recorder
from jaxrl_llm.values import turn_critic
from jaxrl_llm.values.turn_critic import TurnCritic

NAMES = ("turn_q", "turn_v", "turn_states")


def turn_values(critic: TurnCritic, predict: Callable, value: Callable, fit: Callable) -> Recorder:
    """`turn_q`, `turn_v` f32[P, G, K, 2] of a critic that is fitted to the batch first, and the `turn_states` that it reads.

    `predict(own params, policy params, lora, rollouts)`, `value(own params, states)` for states that are recorded, and
    `fit(own, rollouts)` are compiled from `critic`.
    """
    def record(own, params, lora, rollouts):
        if "turn_states" in rollouts.extras:
            return value(own.params, rollouts.extras["turn_states"])
        return predict(own.params, params, lora, rollouts)

    return Recorder("turn_critic", NAMES, record, init=critic.init, fit=lambda own, policy, part: fit(own, part),
                    updates=critic.epochs, fits_first=True)


@recorder("turn_critic", provides=NAMES, needs=("estimator.turn_critic",))
def of_run(context: Context) -> Recorder:
    """The critic of turns with the numbers of the estimator."""
    c, policy, numbers = context.config, context.policy, context.estimator.turn_critic
    critic = TurnCritic(policy.model, context.optimizer(c.critic.learning_rate, numbers.epochs),
                        jax.random.fold_in(jax.random.key(c.seed), 6), clip_norm=c.optimizer.clip_norm or None,
                        mesh=policy.mesh, **numbers._asdict())

    def predict(own, params, lora, rollouts):
        return valued(own, critic.states(params, lora, rollouts))

    def valued(own, states):
        return dict(zip(NAMES, turn_critic.values(own, states))) | {"turn_states": states}

    fit = context.guarded("update of the critic", jax.jit(critic.fit, donate_argnums=0))
    value = context.guarded("values of turns", jax.jit(valued))
    if context.placed is None:
        return turn_values(critic, context.guarded("states and values of turns", jax.jit(predict)), value, fit)
    add = context.guarded("states of turns", jax.jit(critic.with_packed, donate_argnums=0), MAX_LENGTHS)

    def packed(own, params, lora, rollouts):
        (micro_batches, index), states = context.placed(rollouts), critic.no_states(rollouts)
        for rows, start in micro_batches:
            states = add(states, params, lora, rollouts, rows, index, start)
        return value(own, states)

    return turn_values(critic, packed, value, fit)
