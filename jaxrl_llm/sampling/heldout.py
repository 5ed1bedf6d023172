"""Held-out performance of a policy, sampled as in training, by a stream apart from that of training."""
import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.evaluation.rates import Rate, bootstrap_mean
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.sampling.by_task import of_task
from jaxrl_llm.sampling.evaluation_set import EvalSpec
from jaxrl_llm.sampling.fitting import fitting_problems, held_out
from jaxrl_llm.sampling.source import Source
from jaxrl_llm.sampling.stream import Stream
from jaxrl_llm.tools.timer import PhaseTimer
from jaxrl_llm.topologies import groups


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Held-out performance of one policy, with its completions.

    score: mean of the first reward component.  reward: mean of the weighted sum of all; None if there is only one.  solved:
    share of completions that solve their problem.  any_solved: share of problems that a completion of the group solves.
    by_task: the same for each task of a run that has several, by label.
    """

    score: Rate
    reward: float | None
    solved: Rate
    any_solved: float
    length: float
    truncated: float
    forest: Forest
    by_task: Mapping[str, "Evaluation"] = dataclasses.field(default_factory=dict)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """The metrics by name."""
        rates = {f"{prefix}/score": self.score, f"{prefix}/solved": self.solved}
        metrics = {f"{name}{side}": value for name, rate in rates.items()
                   for side, value in zip(("", "_low", "_high"), (rate.mean, rate.low, rate.high))} | {
                     f"{prefix}/pass_at_group": self.any_solved, f"{prefix}/length": self.length,
                     f"{prefix}/truncated": self.truncated}
        if self.reward is not None:
            metrics[f"{prefix}/reward"] = self.reward
        for label, part in self.by_task.items():
            metrics |= part.metrics(f"{prefix}/{label}")
        return metrics


def evaluate(source: Source, params, lora, *, problems: int, key: jax.Array, timer: PhaseTimer | None = None,
             temperature: float | None = None) -> Evaluation:
    """Samples a group for each of `problems` held-out problems; ValueError if no prompt fits."""
    forest = sample_held_out(source, params, lora, problems, key, timer, temperature)
    parts = {part.label: of_task(forest, task) for task, part in enumerate(source.task.parts)}
    by_task = {label: measure(part) for label, part in parts.items() if len(part.ends)}
    return dataclasses.replace(measure(forest), by_task=by_task)


def evaluate_set(source: Source, params, lora, which: EvalSpec, *, key: jax.Array, timer: PhaseTimer | None = None
                 ) -> Evaluation:
    """Samples the problems of an evaluation set by its settings; ValueError if no prompt fits."""
    whole = which.stream or source.held_out
    sampling = whole.sampling
    if which.top_p is not None:
        sampling = dataclasses.replace(sampling, top_p=np.float32(which.top_p) if which.top_p < 1 else None)
    stream = whole.apart(partner=whole.partner.scoring(which.reward), sampling=sampling)
    other = dataclasses.replace(source, task=which.task)
    return measure(sample_held_out(other, params, lora, which.problems, key, timer, which.temperature, which.max_tokens,
                                   which.samples, stream))


def sample_held_out(source: Source, params, lora, problems: int, key: jax.Array, timer: PhaseTimer | None = None,
                    temperature: float | None = None, max_tokens: int | None = None, samples: int | None = None,
                    stream: Stream | None = None) -> Forest:
    """`samples` completions (None: a group) for each of `problems` held-out problems; ValueError if no prompt fits.

    `stream`: None: that of the source for held-out problems.
    """
    timer, stream = timer or PhaseTimer(), stream or source.held_out
    stream.forget()
    mine = held_out(source.task.heldout, problems)[jax.process_index()::jax.process_count()]
    rows = fitting_problems(mine, stream.tokenizer, stream.prompt_tokens, source.overlong, jax.process_count(),
                            functools.partial(stream.partner.encode, timer=timer))
    if not rows:
        raise ValueError(f"no held-out prompt fits in prompts.max_tokens={stream.prompt_tokens}; raise it")
    stream.publish(Snapshot(-1, params, lora, key, measuring(temperature, max_tokens)))
    forest = stream.partner.plant([problem for problem, _ in rows], [ids for _, ids in rows], draw=0)
    wanted = samples or stream.group
    acts = [act for first in range(0, wanted, stream.group)
            for act in groups(range(len(rows)), min(stream.group, wanted - first))]
    forest = stream.run(forest, acts, 0, timer)
    stream.rest()
    return forest


def measuring(temperature: float | None = None, max_tokens: int | None = None) -> dict[str, np.generic]:
    """The knobs of a measurement; None: the configuration's number."""
    return {name: dtype(value) for name, dtype, value in (
        ("temperature", np.float32, temperature), ("max_tokens", np.int32, max_tokens)) if value is not None}


def measure(forest: Forest) -> Evaluation:
    """The performance of the policy that sampled the forest."""
    ends = forest.ends
    bounds = np.flatnonzero(np.diff(forest.prompt[ends])) + 1  # an environment may lose trajectories of a group
    score, reward, solved = (np.split(values[ends].astype(np.float64), bounds)
                             for values in (forest.components[:, 0], forest.rewards, forest.solved))
    facts = forests.metrics(forest)
    mean_reward = _rate(reward).mean if forest.components.shape[1] > 1 else None
    return Evaluation(_rate(score), mean_reward, _rate(solved), float(np.mean([group.any() for group in solved])),
                      facts["completion/length"], facts["completion/truncated"], forest)


def _rate(groups: list[np.ndarray]) -> Rate:
    """The mean of the means of groups."""
    return bootstrap_mean(np.array([group.mean() for group in groups])[:, None])
