"""SPEAR: rollouts that are cut, void, unreadable or full of repetitions are not trained on (arXiv 2509.22601)."""
import functools
import operator

from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.control.simpletir_filter import free_of_void
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths.ngrams import most_repeats


def answered(rollouts: Rollouts) -> Array:
    """bool[P, G]: valid rollouts without a void turn, and with an answer, as far as the run records these.

    Environments with tools record `extras["void"]` bool[P, G, T], tokens of turns with neither a call nor an answer. Tasks
    whose reward reads answers record `extras["answers"]` i32[P, G], -1 without an answer.
    """
    kept = rollouts.valid
    if "void" in rollouts.extras:
        kept = free_of_void(rollouts.extras["void"], rollouts.mask, kept)
    return kept & (rollouts.extras["answers"] >= 0) if "answers" in rollouts.extras else kept


@prompt_filter
def spear_rollouts(*, ngram: int = 20, repeats: int = 10) -> Filter:
    """Rollouts that are `answered`, end before a limit, can be read, and repeat no run of `ngram` tokens `repeats` times.

    `extras["truncated"]` bool[P, G] marks those that a limit of the run cuts, `extras["unreadable"]` bool[P, G] those with
    bytes that are no text. The numbers are those of the authors' code, which has further marks of unreadable texts. Raises
    ValueError for a run of no token, and for fewer than two times.
    """
    if ngram < 1 or repeats < 2:
        raise ValueError(f"ngram={ngram}, repeats={repeats}; give a number of tokens, 1 or more, and how often they may not "
                         "occur, 2 or more")

    def keep(rollouts):
        often = most_repeats(rollouts.tokens, rollouts.token_mask, ngram) >= repeats
        faulty = (rollouts.extras[name].astype(bool) for name in ("truncated", "unreadable"))
        return answered(rollouts) & ~functools.reduce(operator.or_, faulty, often)

    return Filter(keep, needs=("tokens", "truncated", "unreadable"), per="rollout")
