"""The divergence of the policy from a reference, from the policy before the update, or from the policy that sampled."""
from jax import lax

from jaxrl_llm.objectives import kl as estimates
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.terms.base import Term, named, term
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.ranges import NOT_NEGATIVE

UNBIASED = "unbiased"
AGAINST = ("reference", "old", "behavior")


@term(ranges={"coef": NOT_NEGATIVE})
def kl(*, coef: float, estimator: str = "k3", against: str = "reference") -> Term:
    """`coef * KL_t`, an estimate of KL(policy || `against`) from the sampled tokens, see `objectives.kl`.

    `unbiased` is `rho * k3`, rho the ratio to the policy before the update, through which gradients flow too: its mean over
    tokens of the old policy is the KL of the new one, and so is its gradient, in every update of a batch (DeepSeek-V3.2,
    arXiv 2512.02556; TRL's `use_bias_correction_kl`). `against`: the "reference" (`ref_logprobs`), the "old" policy, or that of
    "behavior", which sampled (`behavior_logprobs`). Metric `kl` (`kl_old`, `kl_behavior`). The GRPO paper has `coef` 0.04, TRL
    0, tunix 0.04 with k1.
    """
    registry.one_of("KL estimator", estimator, (*estimates.ESTIMATORS, UNBIASED))
    registry.one_of("policy of a KL", against, AGAINST)
    name = named("kl", against, "reference")
    needs = {"reference": ("ref_logprobs",), "behavior": ("behavior_logprobs",), "old": ()}[against]

    def value(logprobs, rollouts):
        old = lax.stop_gradient(logprobs) if rollouts.old_logprobs is None else rollouts.old_logprobs
        other = getattr(rollouts, needs[0]) if needs else old
        if estimator == UNBIASED:
            return token_ratio(logprobs, old, rollouts.token_mask) * estimates.token_kl(logprobs, other, "k3")
        return estimates.token_kl(logprobs, other, estimator)

    return Term(name, coef, value, needs=needs, metric=name, reads_old=estimator == UNBIASED or against == "old",
                unknown="old")
