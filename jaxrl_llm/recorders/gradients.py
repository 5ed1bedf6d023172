"""How strongly each completion alone would move the weights."""
from collections.abc import Callable

from jaxrl_llm.recorders.base import Context, Recorder, recorder, texts_of


def gradients(square_norms: Callable) -> Recorder:
    """`score_sq_norms` f32[P, G], by `square_norms(params, lora, rollouts)`, see `learning.gradient_norms`."""
    def record(own, params, lora, rollouts):
        return {"score_sq_norms": square_norms(params, lora, texts_of(rollouts).replace(filled=4))}

    return Recorder("gradients", ("score_sq_norms",), record)


@recorder("gradients", provides=("score_sq_norms",), passes=3)
def of_run(context: Context) -> Recorder:
    """A backward pass takes as many operations as two forward passes."""
    return gradients(context.guarded("gradient norms", context.square_norms))
