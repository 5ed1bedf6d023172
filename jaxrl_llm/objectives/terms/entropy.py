"""A bonus for the entropy of the policy."""
import jax.numpy as jnp

from jaxrl_llm.objectives.entropy import sampled_entropy
from jaxrl_llm.objectives.terms.base import NEEDS, TOKENS, Term, named, term
from jaxrl_llm.tools import registry


@term
def entropy(*, coef: float, on: str = "policy") -> Term:
    """`-coef * H_t` on tokens that the "policy" drew, those of an "expert", or "all"; each keeps its weight in the loss.

    H has the value of the recorded `entropies` and the gradient of the score-function estimate in `objectives.entropy`, whose
    expectation over tokens of the policy is the gradient through all logits.
    """
    chosen = TOKENS[registry.one_of("tokens of an entropy bonus", on, ("policy", "expert", "all"))]
    return Term(named("entropy", on, "policy"), coef, lambda logprobs, rollouts: -sampled_entropy(logprobs, rollouts),
                lambda share, rollouts: jnp.where(chosen(rollouts), share, 0), ("entropies", *NEEDS[on]), reads_old=True)
