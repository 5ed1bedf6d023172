"""Held-out performance of a policy, through the compiled training sampler."""
import dataclasses

import jax

from jaxrl_llm import forest as forests
from jaxrl_llm.evaluation.accuracy import Accuracy, bootstrap_mean, pass_at_k
from jaxrl_llm.forest import Forest
from jaxrl_llm.training.metrics import PhaseTimer
from jaxrl_llm.training.source import Source, sample_held_out


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out performance of one policy, and what it wrote."""

    accuracy: Accuracy
    any_right: float
    length: float
    truncated: float
    forest: Forest

    def metrics(self) -> dict[str, float]:
        """Numbers by name."""
        return {"eval/accuracy": self.accuracy.mean, "eval/accuracy_low": self.accuracy.low,
                "eval/accuracy_high": self.accuracy.high, "eval/pass_at_group": self.any_right,
                "eval/length": self.length, "eval/truncated": self.truncated}


def evaluate(source: Source, params, lora, *, problems: int, key: jax.Array, timer: PhaseTimer | None = None,
             temperature: float | None = None) -> Evaluation:
    """Samples a group for each of `problems` held-out problems; ValueError where no prompt fits."""
    forest = sample_held_out(source, params, lora, problems, key, timer, temperature)
    group = source.sampler.group
    first_component = forest.components[forest.ends, 0].reshape(-1, group)
    facts = forests.metrics(forest)
    return Evaluation(bootstrap_mean(first_component), pass_at_k(first_component > 0.5, group), facts["completion/length"],
                      facts["completion/truncated"], forest)
