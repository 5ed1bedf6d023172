"""Held-out performance of a policy, through the compiled training sampler."""
import dataclasses

import jax
import numpy as np

from jaxrl_llm import forest as forests
from jaxrl_llm.evaluation.rates import Rate, bootstrap_mean
from jaxrl_llm.forest import Forest
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.source import Source, sample_held_out


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out performance of one policy, and what it wrote.

    score: mean of the first reward component.  solved: share of completions that solve their problem.  any_solved: share of
    problems that one of the group solves.
    """

    score: Rate
    solved: Rate
    any_solved: float
    length: float
    truncated: float
    forest: Forest

    def metrics(self) -> dict[str, float]:
        """Numbers by name."""
        rates = {"eval/score": self.score, "eval/solved": self.solved}
        return {f"{name}{side}": value for name, rate in rates.items()
                for side, value in zip(("", "_low", "_high"), (rate.mean, rate.low, rate.high))} | {
                    "eval/pass_at_group": self.any_solved, "eval/length": self.length, "eval/truncated": self.truncated}


def evaluate(source: Source, params, lora, *, problems: int, key: jax.Array, timer: PhaseTimer | None = None,
             temperature: float | None = None) -> Evaluation:
    """Samples a group for each of `problems` held-out problems; ValueError where no prompt fits."""
    forest = sample_held_out(source, params, lora, problems, key, timer, temperature)
    ends = forest.ends
    bounds = np.flatnonzero(np.diff(forest.prompt[ends])) + 1  # an environment may lose some of a group
    score, solved = (np.split(values[ends].astype(np.float64), bounds) for values in (forest.components[:, 0], forest.solved))
    facts = forests.metrics(forest)
    return Evaluation(_rate(score), _rate(solved), float(np.mean([group.any() for group in solved])),
                      facts["completion/length"], facts["completion/truncated"], forest)


def _rate(groups: list[np.ndarray]) -> Rate:
    """The mean of the means of groups."""
    return bootstrap_mean(np.array([group.mean() for group in groups])[:, None])
