"""The cost of a run up to each line of its metrics, on four axes: steps, generated tokens, operations, training seconds."""
import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.evaluation import flops
from jaxrl_llm.methods.provision import needs_of
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.setup.forecast import recorders_of
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.numbers import method_parts
from jaxrl_llm.setup.problems import make_task
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.setup.start import open_model
from jaxrl_llm.setup.stored import stored_config, whole_config
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.store.workdir import load_code
from jaxrl_llm.tokenizers import Tokenizer
from jaxrl_llm.values.features import feature_size

# A step this many times slower than the run's median was waiting for the compiler (a filter draws at most a few rounds).
SLOW = 5.0


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """Metrics of a run, one entry `[N]` per line, and what had been spent when that line was written.

    `spent["tokens"]`: all sampled completion tokens, those that a filter dropped or that were drawn in further rounds
    included. `spent["flops"]`: operations of sampling, log-probs and updates over useful tokens. `spent["seconds"]`: collecting
    and learning, without evaluations, checkpoints and compilation. Evaluations and the supervised warm-up are in none of them.
    """

    metrics: dict[str, np.ndarray]
    spent: dict[str, np.ndarray]

    def evaluated(self, unit: str) -> float:
        """What had been spent at the last held-out evaluation; 0 before any."""
        made = np.isfinite(self.metrics.get("eval/score", np.zeros(0)))
        return float(self.spent[unit][made][-1]) if made.any() else 0.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a step of given lengths costs."""

    model: ModelConfig
    prompt: float
    prompts: int
    group: int
    epochs: int
    passes: int
    critic: int = 0
    pretrain_steps: int = 0

    def step_flops(self, length: np.ndarray, draws: np.ndarray, trained: np.ndarray) -> np.ndarray:
        """Operations of the first N steps, whose completions have mean length `length`.

        `draws` and `trained` are the rollouts that were sampled and that the updates learned from, in batches of the run.
        Text that the policy did not write counts as length: it takes the same passes through the model.

        `passes` forward passes of the policy for log-probs and `critic` passes of a model of its size without logits are made
        per step; the policy is not updated in the first `pretrain_steps`. All this is done on what is trained. Mean lengths are
        used: exact except for the spread of lengths in the attention's small quadratic term.
        """
        model, prompt = self.model, round(self.prompt)
        operations = np.zeros(len(length))
        for i, (mean, drawn, kept) in enumerate(zip(length, draws, trained)):
            below, share = int(mean), mean - int(mean)
            def between(count):
                return (1 - share) * count(below) + share * count(below + 1)
            sampling = flops.prefill_flops(model, [prompt]) + self.group * between(
                lambda n: flops.decode_flops(model, prompt, max(n, 1)))
            forward = between(lambda n: flops.packed_flops(model, prompt, [n] * self.group))
            states = forward - 2 * model.vocab_size * model.hidden_size * self.group * mean
            passes = self.passes + 3 * self.epochs * (i >= self.pretrain_steps)
            operations[i] = self.prompts * (drawn * sampling + kept * (passes * forward + self.critic * states))
        return operations


def costs_of(config: ConfigDict, prompt: float) -> Costs:
    """The costs of a run by its stored configuration, with prompts of `prompt` tokens on average."""
    method = method_of(config)
    estimator, objective = method_parts(config, method, feature_size(config.model.hidden_size))  # sizes change no needs
    needs = needs_of(method, estimator, objective)
    if config.learner.micro_batches == 1:  # the update's own forward pass gives the features
        needs -= {"features"}
    passes = sum(one.passes for one in recorders_of(config, needs))
    model = _opened(_text(config.model))[1].config
    costs = Costs(model, prompt, config.prompts.per_step, config.sampling.group, config.learner.epochs, passes)
    if estimator.value_targets is None:
        return costs
    fit = 3 if config.critic.kind == "separate" else 1  # a head is fitted to states without gradients
    return dataclasses.replace(costs, critic=1 + fit * config.learner.epochs, pretrain_steps=config.critic.pretrain_steps)


def _text(model: ConfigDict) -> str:
    return json.dumps(model.to_dict(), sort_keys=True)


@functools.cache
def _opened(model: str) -> tuple[Tokenizer, Transformer]:
    return open_model(ConfigDict(json.loads(model)))[:2]


@functools.cache
def _drawn_prompt(model: str, task_text: str) -> float:
    """Mean length in tokens of 256 training prompts drawn with a fixed seed."""
    tokenizer, _ = _opened(model)
    problems = make_task(task_text).train
    drawn = np.random.default_rng(0).permutation(len(problems))[:256]
    return float(np.mean([len(encode_problem(problems[int(i)], tokenizer)) for i in drawn]))


def without_compiling(seconds: np.ndarray) -> np.ndarray:
    """`seconds [N]` per step, with values above `SLOW` medians replaced by the median."""
    median = np.median(seconds) if len(seconds) else 0.0
    return np.where(seconds > SLOW * median, median, seconds)


def read_run(folder: Path, units: tuple[str, ...] = ("steps", "tokens", "flops", "seconds")) -> RunMetrics | None:
    """The run in `folder`; None where nothing has been measured yet. Only `units` are counted."""
    if not (folder / "metrics.jsonl").exists() or not (folder / "config.json").exists():
        return None
    metrics, config = read_metrics(folder), whole_config(folder)
    steps = metrics["step"]
    if not len(steps):
        return None
    trained = steps > 0
    zeros = np.zeros(len(steps))
    def measured(name):  # a line without it counts as nothing: NaN would hide for ever that a budget is used
        return np.nan_to_num(metrics.get(name, zeros)[trained])
    length = measured("completion/length")
    there = measured("completion/present" if "completion/present" in metrics else "completion/length")  # read, not written
    stretches = _stretches(folder, metrics, config, trained)
    batch = sum(own * one.prompts.per_step * one.sampling.group for own, one in stretches)
    draws = np.maximum(measured("filter/draws"), 1)
    tokens = length * draws * batch
    if "completion/tokens" in metrics:  # newer runs count them
        tokens = measured("completion/tokens")
        draws = tokens / np.maximum(length * batch, 1)
    def operations():
        made, kept = zeros[trained], measured("trained/rollouts") / batch
        for own, one in stretches:
            costs = _costs_of(resolve(one, methods.get(one.method).defaults), metrics, trained, own)
            made[own] = costs.step_flops(there[own], draws[own], kept[own])
        return made
    per_step = {
        "steps": lambda: np.ones(trained.sum()),
        "tokens": lambda: tokens,
        "flops": operations,
        "seconds": lambda: without_compiling(measured("time/step")),
    }
    spent = {}
    if "flops" in units:  # the costs are those of the method
        load_code(folder)
    for unit in units:
        spent[unit] = zeros.copy()
        spent[unit][trained] = np.cumsum(per_step[unit]())
    return RunMetrics(metrics, spent)


def _stretches(folder: Path, metrics: dict[str, np.ndarray], config: ConfigDict, trained: np.ndarray
               ) -> list[tuple[np.ndarray, ConfigDict]]:
    """The configuration of each phase of a run, with its steps among those that were `trained`, bool[N]."""
    if "phase" not in metrics:
        return [(np.ones(trained.sum(), bool), config)]
    numbers, steps = metrics["phase"][trained], metrics["step"][trained]
    return [(own, stored_config(folder, int(steps[own][0])))
            for own in (numbers == number for number in np.unique(numbers[np.isfinite(numbers)]))]


def _costs_of(config: ConfigDict, metrics: dict[str, np.ndarray], trained: np.ndarray, own: np.ndarray) -> Costs:
    """The costs of these of the `trained` steps, with the prompts that they had."""
    lengths = metrics["prompt/length"][trained][own] if "prompt/length" in metrics else np.zeros(0)
    if len(lengths := lengths[np.isfinite(lengths)]):
        return costs_of(config, float(lengths.mean()))
    return costs_of(config, _drawn_prompt(_text(config.model), config.task))  # earlier runs did not measure it
