"""A bonus for the entropy of the policy."""
import jax.numpy as jnp

from jaxrl_llm.data.rollouts import CURRENT_ENTROPIES
from jaxrl_llm.objectives.terms.base import NEEDS, TOKENS, Term, named, term
from jaxrl_llm.tools import registry


@term
def entropy(*, coef: float, on: str = "policy") -> Term:
    """`-coef * H_t` on tokens that the "policy" drew, those of an "expert", or "all"; each keeps its weight in the loss.

    H is the entropy of the policy that is updated, over all tokens of the vocabulary, with its exact gradient: the update puts
    it into `extras["current_entropies"]` f32[P, G, T], through which the loss is differentiated.
    """
    chosen = TOKENS[registry.one_of("tokens of an entropy bonus", on, ("policy", "expert", "all"))]
    return Term(named("entropy", on, "policy"), coef, lambda logprobs, rollouts: -rollouts.extras[CURRENT_ENTROPIES],
                lambda share, rollouts: jnp.where(chosen(rollouts), share, 0), (CURRENT_ENTROPIES, *NEEDS[on]))
