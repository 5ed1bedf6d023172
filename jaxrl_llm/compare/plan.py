"""The runs of a comparison: methods with their overrides, a grid, seeds and a budget, each written as one line of text."""
import dataclasses
import hashlib
import itertools
import pprint
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import methods
from jaxrl_llm.methods import texts
from jaxrl_llm.objectives.schedules import is_schedule, takes_steps
from jaxrl_llm.runs.progress import ENDLESS  # of runs with a budget in another unit than steps, which ends them
from jaxrl_llm.setup.keys import set_key
from jaxrl_llm.setup.names import method_of
from jaxrl_llm.setup.phases import follows_steps, phases_of, recorded, text_of
from jaxrl_llm.store import own_code
from jaxrl_llm.store.workdir import config_changes, read_config, resolve_config
from jaxrl_llm.tools import written
from jaxrl_llm.tools.registry import one_of

UNITS = {"tokens": "generated tokens", "flops": "floating-point operations", "seconds": "training seconds", "steps": "steps"}


@dataclasses.dataclass(frozen=True, eq=False)
class Contestant:
    """One contestant: its label in tables, the whole configuration except seed and steps, and its text in the list.

    `settings`: differences from what all share that the label does not say: those of a suite, and of brackets.
    """

    label: str
    config: ConfigDict
    text: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The text as the name of a folder."""
        name = re.sub(r"[^\w.=+-]+", "_", self.text).strip("_")
        return name if len(name) <= 120 else f"{name[:100]}_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"


class Budget(NamedTuple):
    """What a run may spend: `size` of `unit`, one of `UNITS`."""

    unit: str
    size: float


class Job(NamedTuple):
    """One run: its contestant, seed, folder and configuration file."""

    entry: Contestant
    seed: int
    folder: Path
    config_file: Path

    @property
    def title(self) -> str:
        return f"{self.entry.label} seed {self.seed}"


def read_entries(text: str, base: ConfigDict, settings: Mapping[str, Mapping[str, Any]] = {}) -> list[Contestant]:
    """`"grpo, gspo(sampling.group=8, objective='clip_high=0.3')"`: methods, with differences from `base` in brackets.

    A method is a name of the catalogue, or your own "module:row"; what is in brackets may name its parts, `objective=gspo`.
    `all` means the methods that run by name, GRPO first, which suites compare the others with. A contestant is labelled by its
    method, and by the settings in brackets that distinguish it from others with the same method. `settings` are further
    differences from `base` by method; what is in brackets replaces them. Raises ValueError: an unknown method, part or key,
    a value of another type, the same contestant twice, other held-out problems.
    """
    entries, brackets = [], []
    for part in _everyone() if text.strip() == "all" else written.parts(text):
        method, given = _read_entry(part)
        own = {key: value for key, value in settings.get(method, {}).items() if key not in given}
        config = changed(base, {"method": method} | own | given)
        try:
            method_of(config)
        except ValueError as error:
            raise ValueError(f"{part}: {error}") from error
        entries.append(Contestant(method, config, part, own | given))
        brackets.append(given)
    names = [entry.name for entry in entries]
    twice = sorted({entry.text for entry in entries if names.count(entry.name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} would share a folder; give each method once, or with other settings")
    if not entries:
        raise ValueError("no methods to compare; give for example --methods=grpo,rloo")
    problems = {entry.text: entry.config.eval.problems for entry in entries}
    if len(set(problems.values())) > 1:
        raise ValueError("eval.problems differs (" + ", ".join(f"{count} of {text}" for text, count in problems.items())
                         + "), so scores would be of other held-out problems; give all methods the same number")
    return _labelled(entries, brackets)


def _labelled(entries: Sequence[Contestant], brackets: Sequence[Mapping[str, Any]]) -> list[Contestant]:
    """The contestants, labelled by their methods and by those of the settings in their brackets that distinguish them."""
    def labelled(entry, label, own):
        rest = {key: value for key, value in entry.settings.items() if key not in own}
        return dataclasses.replace(entry, label=label, settings=rest)

    made = []
    for entry, given in zip(entries, brackets):
        rivals = [other for one, other in zip(entries, brackets) if one.label == entry.label]
        own = {key: value for key, value in given.items() if any(key not in other or other[key] != value for other in rivals)}
        text = ", ".join(f"{key}={value}" if key in texts.SLOTS else f"{key}={value!r}" for key, value in own.items())
        made.append(labelled(entry, f"{entry.label}({text})" if own else entry.label, own))
    if len({entry.label for entry in made}) < len(made):  # of 1 and 1.0
        return [labelled(entry, entry.text, given) for entry, given in zip(entries, brackets)]
    return made


def _read_entry(text: str) -> tuple[str, dict[str, Any]]:
    """A contestant's method and what is in its brackets."""
    call = re.fullmatch(r"([\w.]+(?::\w+)?)\s*(?:\((.*)\))?", text, re.DOTALL)
    if call is None:
        raise ValueError(f"cannot read the method {text!r}; write method, or method(key=value, key=value)")
    try:
        return call[1], read_options(call[2] or "")
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _everyone() -> list[str]:
    """The methods that run by name and sample, GRPO first."""
    return sorted((name for name in methods.runnable() if not methods.get(name).source), key=lambda name: name != "grpo")


def read_options(text: str) -> dict[str, Any]:
    """`"a.b=1, c='x'"` as `written.keywords` reads it, with dotted names; texts of parts need no quotes."""
    options = {}
    for part in written.parts(text):
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", name.strip()) or name.strip() in options:
            raise ValueError(f"cannot read {part!r} in {text!r}; write key=value, key=value, each key once")
        options[name.strip()] = (written.unquoted if name.strip() in texts.SLOTS else written.literal)(value.strip())
    return options


def read_grid(text: str) -> list[dict[str, object]]:
    """`"optimizer.learning_rate=1e-4|3e-4, sampling.group=8|16"`: every combination, the last key varying fastest.

    Raises ValueError: a range, which has no combinations.
    """
    space = {name: _choices(name, choices) for name, choices in _space(text)}
    ranges = [name for name, choices in space.items() if isinstance(choices, tuple)]
    if ranges:
        raise ValueError(f"--grid={text!r}: {', '.join(ranges)} is a range, of which --trials=N draws points; without trials "
                         "give values, a|b")
    return [dict(zip(space, chosen)) for chosen in itertools.product(*space.values())]


def draw_settings(text: str, trials: int) -> list[dict[str, object]]:
    """Random search: the configured setting, `{}`, and `trials - 1` points of a space, the same ones in every call.

    The space is `"optimizer.learning_rate=1e-5..1e-2, sampling.group=8|16"`: points of a range are uniform in logarithms, to
    three digits; all values of a list are equally likely. Raises ValueError: a range whose ends are not 0 < a < b.
    """
    space = {name: _choices(name, choices) for name, choices in _space(text)}
    random = np.random.default_rng(0)

    def point(choices):
        if isinstance(choices, list):
            return choices[int(random.integers(len(choices)))]
        return float(f"{np.exp(random.uniform(*np.log(choices))):.3g}")
    return [{}, *({name: point(choices) for name, choices in space.items()} for _ in range(trials - 1))]


def _space(text: str) -> list[tuple[str, str]]:
    """Name and choices of each part."""
    return [(name.strip(), choices.strip()) for name, _, choices in (part.partition("=") for part in written.parts(text))]


def _choices(name: str, text: str) -> list[object] | tuple[float, float]:
    """The values `a|b|c`, or the ends of a range `a..b`."""
    ends = re.fullmatch(r"([\d.e+-]+?)\.\.([\d.e+-]+)", text)
    if ends is None:
        return [read_options(f"{name}={choice}")[name] for choice in text.split("|")]
    low, high = float(ends[1]), float(ends[2])
    if not 0 < low < high:
        raise ValueError(f"{name}={text}: a range is low..high with 0 < low < high, for example 1e-5..1e-2")
    return low, high


def read_budget(text: str, config: ConfigDict) -> Budget:
    """`"tokens=2e6"`; without text the steps of `config`.

    Raises ValueError: an unknown unit; or a schedule that needs the number of steps, which only a budget in steps gives.
    """
    options = read_options(text) or {"steps": config.steps}
    unit, size = next(iter(options.items()))
    one_of("unit of --budget", unit, UNITS)
    if len(options) > 1 or isinstance(size, str) or not size > 0:
        raise ValueError(f"--budget={text!r}: give one unit and its size above 0, for example tokens=2e6")
    if unit == "steps" and size != int(size):
        raise ValueError(f"--budget={text!r}: a number of steps is whole")
    return Budget(unit, float(size))


def check_schedule(entry: Contestant, budget: Budget) -> None:
    """Raises ValueError if the budget does not give what a run needs: steps for schedules and phases, evaluations."""
    if budget.unit == "steps":
        try:
            phases_of(changed(entry.config, {"steps": int(budget.size)}))
        except ValueError as error:
            raise ValueError(f"{entry.label}: {error}") from None
        return
    if following := _following_steps(entry.config):
        raise ValueError(f"{entry.label}: {', '.join(following)} needs the number of steps, which a budget in {budget.unit} "
                         "leaves open; use a constant, steps=N in a schedule of the objective, or --budget=steps=N")
    if not entry.config.eval.every:
        raise ValueError(f"{entry.label}: eval.every=0 has no evaluation after which a run of a budget in {budget.unit} could "
                         "end; give for example --config.eval.every=10")


def _following_steps(config: ConfigDict) -> list[str]:
    """The settings that follow the number of steps of a run."""
    rate = config.optimizer.schedule
    following = [f"objective's {value} of {name}" for name, numbers in method_of(config).parts("objective")
                 for value in numbers.values() if is_schedule(value) and takes_steps(value)]
    stages = text_of(config)
    return [*[f"phases={stages!r}"] * follows_steps(stages), *[f"optimizer.schedule={rate!r}"] * (rate != "constant"),
            *following]


def changed(base: ConfigDict, changes: dict[str, object]) -> ConfigDict:
    """A copy of `base` with dotted keys changed; ValueError names an unknown key or a value of another type."""
    config = base.copy_and_resolve_references()
    for key, value in changes.items():
        set_key(config, key, value)
    return config


def tuned(entry: Contestant, choice: dict[str, object]) -> Contestant:
    """The contestant with the settings of a grid point, under the same label; ValueError if its brackets set one."""
    if both := sorted(choice.keys() & _read_entry(entry.text)[1].keys()):
        raise ValueError(f"{entry.text}: {', '.join(both)} is in --grid too, which would replace it; leave it out of one of "
                         "them (--grid= turns tuning off)")
    return dataclasses.replace(entry, config=changed(entry.config, choice))


def jobs_of(entries: list[Contestant], seeds: list[int], budget: Budget, root: Path) -> list[Job]:
    """All runs under `root`, seed by seed, so that the first finished ones already form a comparison."""
    return [Job(entry, seed, root / entry.name / f"seed{seed}", root / entry.name / "config.py")
            for seed in seeds for entry in entries]


def share(jobs: list[Job], text: str) -> list[Job]:
    """The jobs of part `"i/n"`, counted from 1; the n parts are disjoint and hold all jobs."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--share={text!r}; write part/parts, for example 2/8")
    return jobs[int(match[1]) - 1::int(match[2])]


def run_config(job: Job, budget: Budget) -> ConfigDict:
    """The configuration that the trainer gets. Every evaluation saves a checkpoint: the run may be stopped right after it."""
    steps = int(budget.size) if budget.unit == "steps" else ENDLESS
    saved = min(filter(None, (job.entry.config.checkpoint.every, job.entry.config.eval.every)), default=0)
    return changed(job.entry.config, {"seed": job.seed, "steps": steps, "checkpoint.every": saved})


def check_folder(job: Job, budget: Budget) -> None:
    """Raises ValueError when the folder of a job holds a run of other settings.

    The number of saves may differ, and that of steps if no schedule follows it.
    """
    stored = read_config(job.folder / "config.json")
    if stored is None:
        return
    config = run_config(job, budget)
    wanted = resolve_config(recorded(config))
    free = ("checkpoint.",) if _following_steps(config) else ("checkpoint.", "steps:")
    differ = [line for line in config_changes(stored, wanted) if not line.startswith(free) and "(absent)" not in line]
    if differ:
        raise ValueError(f"{job.folder} holds a run of other settings ({'; '.join(differ)}); delete it or choose another --out")


def write_config(job: Job, budget: Budget) -> None:
    """The configuration of a job as a file that experiments/train.py reads; the seed is given beside it."""
    values = changed(run_config(job, budget), {"seed": 0}).to_dict()
    text = (f'"""{job.entry.text}, written by experiments/compare.py."""\nfrom ml_collections import ConfigDict\n\n'
            f"from jaxrl_llm.store import own_code\n\nown_code.load({own_code.origins()!r})\n\n\n"
            f"def get_config():\n    return ConfigDict({pprint.pformat(values, width=120, indent=1)}).lock()\n")
    job.config_file.parent.mkdir(parents=True, exist_ok=True)
    job.config_file.write_text(text)
