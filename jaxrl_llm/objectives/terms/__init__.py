"""Terms that are added to any objective, one file each: `ppo_clip(clip_high=0.28) + kl(0.01) + entropy(0.001)`."""
from jaxrl_llm.objectives.terms.base import TERMS, Term, composed, term
from jaxrl_llm.tools import registry

__all__ = ["TERMS", "Term", "composed", "make", "term"]

registry.discover(__name__, __path__)


def make(slug: str, **numbers) -> Term:
    """The term called `slug`, also your own "module:function"; ValueError with the nearest match if there is none."""
    return TERMS.make(slug, **numbers)
