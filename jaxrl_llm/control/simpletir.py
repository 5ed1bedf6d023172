"""SimpleTIR's choice of prompts: rollouts disagree, and the prompt is neither hopeless nor solved (arXiv 2509.02479)."""
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


def worth_learning(score_PG: Array, valid_PG: Array, *, lowest: float, highest: float, min_std: float) -> Array:
    """bool[P]: population std of the scores of at least `min_std`, and a mean score in [lowest, highest]."""
    mean = masked.mean(score_PG, valid_PG, axis=1)
    spread = masked.std(score_PG, valid_PG, axis=1, ddof=0)
    return (spread >= min_std - 1e-6) & (mean >= lowest - 1e-6) & (mean <= highest + 1e-6)


@prompt_filter
def simpletir(*, lowest: float = 0.1, highest: float = 0.9, min_std: float = 1e-3) -> Filter:
    """Prompts that are `worth_learning` by `Rollouts.score`; the numbers are those of the published code."""
    return Filter(lambda rollouts: worth_learning(rollouts.score, rollouts.valid, lowest=lowest, highest=highest,
                                                  min_std=min_std))
