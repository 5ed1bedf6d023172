"""ECHO: the likelihood of what an environment answers, beside the loss of the policy's tokens (arXiv 2605.24517)."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.terms.base import Term, term
from jaxrl_llm.tools.ranges import NOT_NEGATIVE
from jaxrl_llm.tools.registry import Conflict

_ONE_TURN = Conflict(("config.environment",), "the term 'echo' learns from answers of an environment, and this run has none",
                     "set environment, or leave the term out", lambda environment: not environment)


@term(conflicts=(_ONE_TURN,), ranges={"coef": NOT_NEGATIVE})
def echo(*, coef: float = 0.05) -> Term:
    """`coef * mean of -log p` over the tokens of the environment, in the rollouts that the loss learns from.

    The paper's `L = L_GRPO(tokens of the policy) + coef L_env(tokens of the environment)`: each mean is over its own tokens, so
    that long answers do not dilute the policy gradient, and rollouts without any advantage still learn. The log-probs come
    from the pass of the update. `coef` is the paper's, who report 0.01 to 0.05 to be good. Tokens are all that the environment
    writes; the paper leaves out lines that warn of malformed calls. Metric `echo`.
    """
    def weights(share, rollouts):
        tokens = rollouts.token_mask & rollouts.extras["observed"]
        return jnp.where(tokens, 1 / jnp.maximum(masked.count(tokens), 1), 0)

    return Term("echo", coef, lambda logprobs, rollouts: -logprobs, weights, ("observed",), metric="echo", apart=True)
