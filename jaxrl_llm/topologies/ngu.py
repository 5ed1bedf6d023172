"""NGU, never give up: a prompt without a right rollout gets another group, again and again (arXiv 2609.13443)."""
import numpy as np

from jaxrl_llm.tools.ranges import SHARE
from jaxrl_llm.topologies.rules import Rule, rule, success


@rule(ranges={"again": SHARE})
def ngu(*, again: float = 0.95) -> Rule:
    """Another `first` rollouts, with probability `again` each time, while none of a prompt's rollouts is right; up to `most`.

    A prompt that is never solved gets `first / (1 - again)` rollouts in expectation, if `most` allows them: 20 groups. The
    default of `sampling.max_group` allows four, which 0.95^3 = 86% of such prompts reach. Prompts with right and wrong rollouts
    are trained on, with all their rollouts. Those that are all right after the first group leave, as do those that are given
    up. 0.95 is the paper's number for GSM8K and Manufactoria, in groups of 4; it has 0.875 for DeepScaleR.
    Here the rounds of a prompt follow one another in one step, with the same weights. Those of the paper go on beside training:
    rollouts older than 4 updates count in the baseline alone, and the advantages of the other wrong ones grow to balance that.
    """
    def mixed(rewards, valid):
        rate = success(rewards, valid)
        return (rate > 0) & (rate < 1)

    def more(rewards, valid, first, most, chance):
        rounds = -(-valid.sum(1) // first)  # an environment may have lost some of a round
        return np.where((success(rewards, valid) == 0) & (chance < again**rounds), first, 0)

    return Rule(more, mixed, solved=True, draws=True)
