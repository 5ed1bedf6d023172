"""Advantage estimators, one file each: `advantages.make("grpo", eps=1e-6)`; the usual ones also `advantages.grpo(eps=1e-6)`."""
from jaxrl_llm.advantages.base import ESTIMATORS, Estimator, estimator, stateful, stateless
from jaxrl_llm.advantages.grpo import grpo
from jaxrl_llm.advantages.poise import poise
from jaxrl_llm.advantages.reinforce import reinforce
from jaxrl_llm.advantages.rloo import rloo
from jaxrl_llm.advantages.v0_5 import v0_5
from jaxrl_llm.tools import registry

__all__ = ["Estimator", "estimator", "grpo", "make", "names", "poise", "reinforce", "rloo", "stateful", "stateless", "v0_5"]

registry.discover(__name__, __path__)


def names() -> list[str]:
    """All estimators, sorted."""
    return sorted(ESTIMATORS)


def make(slug: str, **hyper) -> Estimator:
    """The estimator called `slug` with hyper-parameters `hyper`; ValueError with the nearest match if there is none."""
    return ESTIMATORS.make(slug, **hyper)
