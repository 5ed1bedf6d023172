"""The load-balancing loss of a mixture of experts (arXiv 2101.03961, equations 4 to 6), over a whole mini-batch."""
import jax
import jax.numpy as jnp

from jaxrl_llm.models.moe import Loads
from jaxrl_llm.objectives.terms.base import Term, term
from jaxrl_llm.tools.ranges import NOT_NEGATIVE
from jaxrl_llm.tools.registry import Conflict


def uneven(loads: Loads, chosen: jax.Array, per_token: int) -> jax.Array:
    """`mean over layers of E sum_e f_e p_e`; f32[]: k if all experts get equally many tokens, else more.

    f_e is the share of tokens that chose expert e, p_e the mean of the router's probabilities for it. The shares have no
    gradient. They are computed over the whole mini-batch, so that losses of its micro-batches add up to its own; shares of
    each micro-batch would demand balance within every few sequences (arXiv 2501.11873).

    Args:
      loads: `f32[P, L, E]`, of a (micro-)batch.
      chosen: `f32[L, E]`, tokens that chose each expert in the whole mini-batch.
      per_token: k, experts of a token.
    """
    tokens = jnp.maximum(chosen.sum(-1, keepdims=True) / per_token, 1)
    per_layer = (chosen / tokens * loads.probs.sum(0) / tokens).sum(-1)
    return chosen.shape[-1] * per_layer.mean()


_DENSE = Conflict(("model",), "the term 'balance' is for experts, and this model has none",
                  "leave it out, or take a mixture of experts", lambda model: model.experts is None)


@term(conflicts=(_DENSE,), ranges={"coef": NOT_NEGATIVE})
def balance(*, coef: float) -> Term:
    """`coef` times the load-balancing loss of a model with experts; 0.001 to 0.01 are usual. Metric `moe/balance_loss`.

    It counts the tokens of prompts and completions, and sees the whole mini-batch: micro-batches cost a further forward pass.
    """
    return Term("balance", coef, loads=uneven, metric="moe/balance_loss")
