"""How strongly each token pulls at the logits: what baselines of the smallest variance weigh rewards by."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


def logit_gradients(squares: Callable) -> Recorder:
    """`logit_gradients` f32[P, G, T], by `squares(params, lora, rollouts)`, the compiled `Policy.logit_gradients`."""
    def record(own, params, lora, rollouts):
        return {"logit_gradients": squares(params, lora, texts_of(rollouts))}

    return Recorder("logit_gradients", ("logit_gradients",), record)


@recorder("logit_gradients", provides=("logit_gradients",), passes=1)
def of_run(context: Context) -> Recorder:
    """In as many parts as other log-probs of a batch."""
    squares = context.jitted(type(context.policy).logit_gradients, context.policy, context.pieces)
    return logit_gradients(context.guarded("logit_gradients", squares))
