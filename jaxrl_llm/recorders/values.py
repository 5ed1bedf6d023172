"""The values of a critic, which is trained beside the policy."""
from collections.abc import Callable

from jaxrl_llm.data.packing import MAX_LENGTHS
from jaxrl_llm.recorders.base import Context, Recorder, recorded, recorder, texts_of
from jaxrl_llm.values.critic import Critic, PackedCritic, in_packed_rows, make_packed, make_update


def values(critic: Critic, predict: Callable, fit: Callable) -> Recorder:
    """`values` f32[P, G, T]: `predict` and `fit` are the compiled `Critic.values` and `values.critic.make_update`.

    Both see what they read alone, so that their programs serve fresh and replayed batches.
    """
    def record(own, params, lora, rollouts):
        return {"values": predict(own.params, (params, lora), texts_of(rollouts))}

    def fitted(own, policy, rollouts):
        read = {name: rollouts.extras[name] for name in ("values", "value_targets")}
        return fit(own, policy, recorded(texts_of(rollouts), read))

    return Recorder("critic", ("values",), record, init=critic.init, fit=fitted)


@recorder("critic", provides=("values",), needs=("estimator.value_targets",))
def of_run(context: Context) -> Recorder:
    """The critic that `config.critic` describes, in the layout of the run."""
    c, policy = context.config, context.policy
    critic = Critic(policy.model, context.optimizer(c.critic.learning_rate), kind=c.critic.kind, clip=c.critic.clip or None,
                    mesh=policy.mesh)
    clip_norm = c.optimizer.clip_norm or None
    if context.placed is not None:
        parts, by_length = make_packed(critic, clip_norm=clip_norm), {"values": MAX_LENGTHS, "add": MAX_LENGTHS}
        guarded = PackedCritic(*(context.guarded(f"{name} of the critic", one, by_length.get(name, 1))
                                 for name, one in parts._asdict().items()))
        return values(critic, *in_packed_rows(guarded, context.placed))
    fit = make_update(critic, clip_norm=clip_norm, micro_batches=c.learner.micro_batches)
    predict = context.jitted(Critic.values, critic, c.learner.minibatches * c.learner.micro_batches)
    return values(critic, context.guarded("values", predict), context.guarded("update of the critic", fit))
