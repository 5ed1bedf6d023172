"""Advantage estimators, one file each: `advantages.make("grpo", eps=1e-6)` or `advantages.grpo(eps=1e-6)`."""

from jaxrl_llm import registry
from jaxrl_llm.advantages.base import ESTIMATORS, Estimator, estimator, stateful, stateless

registry.discover(__name__, __path__)
globals().update(ESTIMATORS)


def names() -> list[str]:
    """All estimators, sorted."""
    return sorted(ESTIMATORS)


def make(slug: str, **hyper) -> Estimator:
    """The estimator called `slug` with hyper-parameters `hyper`; ValueError with the nearest match if there is none."""
    return registry.make(ESTIMATORS, "estimator", slug, hyper)


__all__ = ["Estimator", "estimator", "make", "names", "stateful", "stateless", *sorted(ESTIMATORS)]
