"""The likelihood of some tokens, as in supervised learning."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import GIVEN, Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.sft import text_weights
from jaxrl_llm.objectives.terms.base import NEEDS, TOKENS, Term, named, term
from jaxrl_llm.tools import registry


@term
def nll(*, coef: float, on: str = "right") -> Term:
    """`coef * mean of -log p` over tokens of "right" answers, of the "policy", of an "expert", or over "all"; 0 without any.

    The mean is over these tokens, whatever the weights of the objective, without tokens that it leaves out. Right answers, as
    in VAPO (arXiv 2504.05118) with `coef` 0.1, have a reward above 1/2, or are those of `extras["correct"]`. "given" texts
    stand beside the prompts of a batch (`texts.share`), which the objective does not see: `-sum(w log p) / sum(w)` over their
    trained tokens, w the weight of the token's text, with the metric `nll_given`.
    """
    if registry.one_of("tokens of a likelihood", on, (*TOKENS, GIVEN)) == GIVEN:
        return Term("nll_given", coef, lambda logprobs, rollouts: -logprobs, lambda share, rollouts: of_texts(rollouts),
                    (GIVEN,), metric="nll_given", apart=True)
    chosen = TOKENS[on]

    def weights(share, rollouts):
        tokens = chosen(rollouts) & (share > 0)
        return jnp.where(tokens, 1 / jnp.maximum(masked.count(tokens), 1), 0)

    return Term(named("nll", on, "right"), coef, lambda logprobs, rollouts: -logprobs, weights, NEEDS[on])


def of_texts(rollouts: Rollouts) -> Array:
    """f32[P, G, T]: `w / sum(w)` on the trained tokens of given texts, w the weight of the token's text; 0 elsewhere."""
    texts = rollouts.token_mask & rollouts.extras[GIVEN][..., None]
    weights = masked.to_tokens(text_weights(rollouts), texts)
    total = masked.sum(weights, texts)
    return jnp.where(texts, weights / jnp.where(total > 0, total, 1), 0)
