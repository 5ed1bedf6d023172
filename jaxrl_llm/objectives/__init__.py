"""Policy objectives (losses to minimise), one file each: `objectives.make("ppo_clip", clip_high=0.28)`, and terms to add."""
from jaxrl_llm.objectives.base import OBJECTIVES, Objective, objective, token_objective
from jaxrl_llm.objectives.ppo_clip import ppo_clip
from jaxrl_llm.objectives.sums import made, of
from jaxrl_llm.objectives.terms import composed
from jaxrl_llm.tools import registry

__all__ = ["Objective", "composed", "made", "make", "names", "objective", "of", "ppo_clip", "token_objective"]

registry.discover(__name__, __path__)


def names() -> list[str]:
    """All objectives, sorted."""
    return sorted(OBJECTIVES)


def make(slug: str, **hyper) -> Objective:
    """The objective called `slug` with hyper-parameters `hyper`, also your own "module:function".

    ValueError with the nearest match if there is none.
    """
    return OBJECTIVES.make(slug, **hyper)
