"""SPEED-RL: a few rollouts screen prompts, many more go to those that disagree (arXiv 2506.09016)."""
import numpy as np

from jaxrl_llm.topologies.rules import Rule, rule, success


@rule
def speed_rl(*, low: float = 0.0, high: float = 1.0) -> Rule:
    """Up to `most` rollouts for prompts whose first ones have a success rate in `(low, high)`; the others are dropped.

    The screening rollouts are trained on too. Groups thus always have a screen that disagrees, a mild bias that the paper
    accepts. Here the same weights sample both, in one step; the paper's screen is one step older.
    """
    def qualified(rewards, valid):
        rate = success(rewards, valid)
        return (low < rate) & (rate < high)

    def more(rewards, valid, first, most):
        if (valid.sum(1) > first).any():  # the second stage is over; an environment may have lost some of its rollouts
            return np.zeros(len(valid), np.int64)
        return np.where(qualified(rewards, valid), most - first, 0)

    return Rule(more, qualified, solved=True)


def cost(success_rate: np.ndarray, first: int, most: int) -> np.ndarray:
    """f64, expected rollouts for each prompt that passes the screen: `first / (1 - p^first - (1 - p)^first) + most - first`."""
    p = np.asarray(success_rate, np.float64)
    return first / (1 - p**first - (1 - p)**first) + most - first
