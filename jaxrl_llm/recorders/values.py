"""The values of a critic, which is trained beside the policy."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Context, Recorder, recorder
from jaxrl_llm.values.critic import Critic, make_update


def values(critic: Critic, predict: Callable, fit: Callable) -> Recorder:
    """`values` f32[P, G, T]: `predict` and `fit` are the compiled `Critic.values` and `values.critic.make_update`."""
    def record(own, params, lora, rollouts):
        return {"values": predict(own.params, (params, lora), rollouts)}

    return Recorder("critic", ("values",), record, init=critic.init, fit=fit)


@recorder("critic", provides=("values",), needs=("estimator.value_targets",))
def of_run(context: Context) -> Recorder:
    """The critic that `config.critic` describes."""
    c, policy = context.config, context.policy
    critic = Critic(policy.model, context.optimizer(c.critic.learning_rate), kind=c.critic.kind, clip=c.critic.clip or None,
                    mesh=policy.mesh)
    fit = make_update(critic, clip_norm=c.optimizer.clip_norm or None, micro_batches=c.learner.micro_batches)
    predict = context.jitted(Critic.values, critic, c.learner.minibatches * c.learner.micro_batches)
    return values(critic, context.guarded("values", predict), context.guarded("update of the critic", fit))
