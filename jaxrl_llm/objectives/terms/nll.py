"""The likelihood of some tokens, as in supervised learning."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.terms.base import NEEDS, TOKENS, Term, named, term
from jaxrl_llm.tools import registry


@term
def nll(*, coef: float, on: str = "right") -> Term:
    """`coef * mean of -log p` over tokens of "right" answers, of the "policy", of an "expert", or over "all"; 0 without any.

    The mean is over these tokens, whatever the weights of the objective, without tokens that it leaves out. Right answers, as
    in VAPO (arXiv 2504.05118) with `coef` 0.1, have a reward above 1/2, or are those of `extras["correct"]`.
    """
    chosen = TOKENS[registry.one_of("tokens of a likelihood", on, TOKENS)]

    def weights(share, rollouts):
        tokens = chosen(rollouts) & (share > 0)
        return jnp.where(tokens, 1 / jnp.maximum(masked.count(tokens), 1), 0)

    return Term(named("nll", on, "right"), coef, lambda logprobs, rollouts: -logprobs, weights, NEEDS[on])
