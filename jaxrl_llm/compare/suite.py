"""Several comparisons with one list of methods: the gain of each method over the first one on every task, and the ties."""
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from scipy import stats

from jaxrl_llm.compare.figures import names_width, rows_height, save_figure, shortened
from jaxrl_llm.compare.page import table
from jaxrl_llm.compare.plan import UNITS, Budget
from jaxrl_llm.compare.report import RunResult, scores_of
from jaxrl_llm.evaluation.paired import paired_difference
from jaxrl_llm.evaluation.power import paired_deviation, smallest_difference
from jaxrl_llm.tools import files
from jaxrl_llm.tools.figures import COLORS
from jaxrl_llm.tools.registry import one_of

FILE_NAME = "suite.json"
LEVEL = 0.05  # false discoveries among the differences of a task that are called real (Benjamini and Hochberg)


class Contest(NamedTuple):
    """A task of a suite: its configuration file and variant, the budget of a run, and the held-out metric that is compared."""

    name: str
    config: str
    budget: str
    metric: str
    about: str


SUITES = {
    "embedded": (Contest("mixed", "suite:mixed", "tokens=1.2e5", "eval/score",
                         "a third of the problems is easy, a third is learned, a third is out of reach"),
                 Contest("lengths", "suite:lengths", "tokens=6e4", "eval/reward",
                         "completions of heavy-tailed lengths, and a cost of length"),
                 Contest("tools", "suite:tools", "tokens=5e5", "eval/score", "products by a calculator, in two turns")),
    "regimes": (
        Contest("reach", "suite:reach", "tokens=1.2e5", "eval/score",
                "a sixth of the drawn problems is easy, a sixth is learned, and the others are out of reach"),
    ),
}
SEEDS = tuple(map(str, range(10)))  # p is at least 1/512: after correction one method alone can differ among 25
GRID = "optimizer.learning_rate=1e-4|3e-4|1e-3"
METHODS = "grpo, rloo, dr_grpo, dapo, gspo, cispo, reinforce_pp, ppo, poise, v0, v0_5"
# Schedules in proportion to runs of 60 to 160 steps with completions of at most 6 tokens: with the papers' numbers they would
# not act before such a run ends. Methods without an entry run as the catalogue has them.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "acereason_curriculum": {"phases": "short(steps=25, sampling.max_tokens=50%), half(steps=25, sampling.max_tokens=66%), "
                                       "long(steps=25, sampling.max_tokens=83%), all"},  # 3 tokens: a sum with its end
    "brorl": {"prompts.per_step": 12, "sampling.group": 32, "controllers": "usual=16, patience=1"},  # twice the rollouts
    "chord": {"objective": "warmup=20, decay=40"},
    "chord_mu": {"objective": "decay=60"},
    "d3s": {"estimator": "total_steps=60"},
    "demystify_cot": {"estimator": "margin=0"},  # with its 16 every completion is too long
    "dots_rr": {"controllers": "reference=24, every=4, width=64"},  # a quarter more rollouts, as in the paper
    "drive": {"controllers": "steps=(16, 6, 6, 6)"},
    "historical_variance": {"phases": "all(steps=30), one(weights=first)"},
    "oneshot_entropy": {"phases": "all(steps=30), one(weights=first)"},
    "prorl": {"controllers": "patience=1", "phases": "all"},
    # of mixed: prompts of two-digit numbers, then of three digits
    "qwenlong_l1": {"controllers": "limits=(0.4, 1.0)", "phases": "short(steps=40), long"},
    "siri": {"controllers": "period=40"},
    "spear": {"replay_objective": "warmup=40"},
    "spear_clip": {"replay_objective": "warmup=40"},
    "sws": {"phases": "first(steps=20), second(weights=first)"},
    "vapo": {"critic.pretrain_steps": 10},
    "vc_ppo": {"critic.pretrain_steps": 10},
}


def contests(text: str) -> tuple[Contest, ...]:
    """The contests of a suite, `"embedded"`, or some of them, `"embedded:mixed,lengths"`; ValueError for an unknown name."""
    name, _, chosen = text.partition(":")
    known = {contest.name: contest for contest in SUITES[one_of("suite", name, SUITES)]}
    return tuple(known[one_of(f"task of suite {name}", one.strip(), known)] for one in chosen.split(",")) if chosen else (
        *known.values(),)


def smallest_p(seeds: int) -> float:
    """The smallest p-value of flipping the signs of paired differences, `2^(1 - seeds)`: all signs alike, of either kind."""
    return 2.0 ** (1 - seeds)


def level_alone(others: int) -> float:
    """The p-value that a difference needs which stands alone among `others`, by Benjamini and Hochberg's correction."""
    return LEVEL / max(others, 1)


def too_few(seeds: int, others: int) -> str:
    """Why no difference of a single method of `others` can count with these seeds; empty if it can."""
    least, asked = smallest_p(seeds), level_alone(others)
    if least <= asked:
        return ""
    return (f"with {seeds} seeds p is at least {least:.2g}, and a difference that stands alone among {others} needs "
            f"{asked:.2g}: {1 + math.ceil(math.log2(1 / asked))} seeds or more")


def config_of(contest: Contest) -> ConfigDict:
    """The configuration that all runs of a contest share."""
    file, _, variant = contest.config.partition(":")
    return importlib.import_module(f"jaxrl_llm.configs.{file}").get_config(variant)


def analyse(contest: Contest, results: Mapping[str, list[RunResult]], report: Mapping[str, Any]) -> dict[str, Any]:
    """A contest's part of the suite's report, as plain JSON values.

    Every method is compared with the first one of `results` at the budget, and at the training seconds that all runs reached.
    The differences that testing seeds can show follow from the spread on the tuning seeds, which is known beforehand, or
    without these from the testing seeds themselves, after the fact; at the level of a difference that stands alone.
    """
    budget = Budget(**report["budget"])
    axes = {budget.unit: budget, "seconds": Budget("seconds", report["common"]["seconds"])}
    labels = list(results)
    finals = {unit: {label: _by_seed(results[label], *axis, contest.metric) for label in labels} for unit, axis in axes.items()}
    shared = sorted(set.intersection(*(set(scores) for scores in finals[budget.unit].values())))
    table_of = np.array([[finals[budget.unit][label][seed] for seed in shared] for label in labels])
    tuning = _tuning_scores(report)
    pilot = table_of if tuning is None else tuning
    deviation = paired_deviation(pilot) if min(pilot.shape) > 1 else 0.0
    least, others = min(len(scores) for scores in finals[budget.unit].values()), len(labels) - 1
    alone = deviation > 0 and least > 1 and not too_few(least, others)
    visible = smallest_difference(deviation, least, level=level_alone(others)) if alone else None
    rows: dict[str, Any] = {label: {"final": float(np.mean([*scores.values()])), "seeds": len(scores)}
                            for label, scores in finals[budget.unit].items()}
    for unit, by_label in finals.items():
        for label, difference in _against_first(by_label).items():
            rows[label][f"difference_at_{unit}"] = difference
    return {"contest": contest._asdict(), "start": report["start"], "budget": report["budget"], "yardstick": labels[0],
            "seconds": axes["seconds"].size, "deviation": deviation,
            "visible": visible, "power_from": "testing" if tuning is None else "tuning", "methods": rows,
            "settings": {label: dict(results[label][0].job.entry.settings) for label in labels},
            "silent_groups": {label: report["methods"][label]["silent_groups"] for label in labels},
            "warnings": list(report["warnings"]), "command": report["command"]}


def _tuning_scores(report: Mapping[str, Any]) -> np.ndarray | None:
    """`f64[methods, seeds]` of the settings that were kept; None without tuning seeds, or if one of the runs failed."""
    kept = [facts["scores"][facts["grid"].index(facts["chosen"])] for facts in report["tuning"].values()]
    return np.array(kept) if kept and all(isinstance(x, float) for row in kept for x in row) else None


def _by_seed(runs: Sequence[RunResult], unit: str, size: float, metric: str) -> dict[int, float]:
    return dict(zip([r.job.seed for r in runs], scores_of(runs, unit, size, metric)["final"].tolist()))


def _against_first(finals: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Any]]:
    """Differences from the first method, paired by seed, and whether each one is significant after correction."""
    first, *others = finals
    made = {}
    for label in others:
        shared = [seed for seed in finals[label] if seed in finals[first]
                  and np.isfinite(finals[label][seed] - finals[first][seed])]
        if len(shared) > 1:
            made[label] = paired_difference(np.array([finals[label][seed] for seed in shared]),
                                            np.array([finals[first][seed] for seed in shared]))
    if not made:
        return {}
    adjusted = stats.false_discovery_control([test.p_value for test in made.values()])
    return {label: test._asdict() | {"adjusted_p": float(p), "verdict": _verdict(test, float(p))}
            for (label, test), p in zip(made.items(), adjusted)}


def _verdict(test, adjusted: float) -> str:
    """"better" or "worse" where the test and the interval both exclude zero; everything else is a tie."""
    if adjusted > LEVEL or test.low <= 0 <= test.high:
        return "tie"
    return "better" if test.mean > 0 else "worse"


def read(folder: Path) -> list[dict[str, Any]]:
    """The parts of the page in `folder`; none where there is no page yet."""
    text = files.read_text(folder, FILE_NAME)
    return [] if text is None else json.loads(text)


def with_part(parts: Sequence[Mapping[str, Any]], part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts with this one in the place of an older one of its contest, or behind all others."""
    return [*{one["contest"]["name"]: one for one in (*parts, part)}.values()]


def write(parts: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """The page of these parts with its figure, and the file that the next page of the folder continues."""
    (folder / FILE_NAME).write_text(json.dumps(parts, indent=1, allow_nan=False))
    (folder / "README.md").write_text(markdown(parts))
    draw(parts, folder)


def markdown(parts: Sequence[Mapping[str, Any]]) -> str:
    """The suite's page: one table per task, with the differences that its seeds can show, and the commands behind them."""
    lines = ["# The embedded suite", "", "![differences](differences.png)", ""]
    for part in parts:
        lines += [*_section(part), ""]
    commands = dict.fromkeys(part["command"] for part in parts)
    return "\n".join([*lines, "## How this was made", "", "```bash", *commands, "```", ""])


def _section(part: Mapping[str, Any]) -> list[str]:
    contest, first, budget = part["contest"], part["yardstick"], part["budget"]
    counts = [numbers["seeds"] for numbers in part["methods"].values()]
    most = max(counts)
    rows = []
    for label, numbers in sorted(part["methods"].items(), key=lambda item: -item[1]["final"]):
        cells = [_against(numbers.get(f"difference_at_{unit}"), label == first) for unit in (budget["unit"], "seconds")]
        fewer = f", {numbers['seeds']} of {most} seeds" if numbers["seeds"] < most else ""
        rows.append([f"{label}{_own(part['settings'][label])}{fewer}", f"{numbers['final']:.3f}", *cells])
    heads = ["method", f"`{contest['metric']}`", f"minus {first}, at {budget['size']:,.0f} {UNITS[budget['unit']]}",
             f"minus {first}, at {part['seconds']:,.0f} {UNITS['seconds']}"]
    about = (f"{contest['about'].capitalize()}. {most} seeds. {_power(part, min(counts))} Tests flip the signs of paired "
             f"differences; with {most} seeds p is at least {smallest_p(most):.2g}. *Better* and *worse* keep the share of "
             f"false discoveries in a column at {LEVEL:.0%}. [All numbers]({contest['name']}/report.md).")
    return [f"## {contest['name']}", "", about, "", table(heads, rows)]


def _own(settings: Mapping[str, Any]) -> str:
    """What differs from the common configuration, behind a method's name."""
    return f" (`{', '.join(f'{key}={value}' for key, value in settings.items())}`)" if settings else ""


def _power(part: Mapping[str, Any], seeds: int) -> str:
    """The difference that the seeds can show, and whether that was known before they ran."""
    if few := too_few(seeds, len(part["methods"]) - 1):
        return f"{few[0].upper()}{few[1:]}."
    if part["visible"] is None:
        return "The spread of their differences is not known yet."
    seen = f"a difference of {part['visible']:.3f} that stands alone is seen with a chance of 80%"
    if part["power_from"] == "tuning":
        return f"By the spread of paired differences on the tuning seeds ({part['deviation']:.3f}), {seen}."
    return (f"Computed after the fact, from the spread of paired differences on the testing seeds themselves "
            f"({part['deviation']:.3f}): {seen}.")


def _against(difference: Mapping[str, Any] | None, is_first: bool) -> str:
    if difference is None:
        return "" if is_first else "too few seeds"
    return (f"{difference['mean']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}], "
            f"p = {difference['p_value']:.2g}: {difference['verdict']}")


def draw(parts: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Differences from the yardstick with their intervals, one picture for each task."""
    most = max(len(part["methods"]) for part in parts)
    def pictures(axes):
        for ax, part in zip(axes, parts):
            _differences(ax, part)
    width = 4.5 * len(parts) + sum(names_width(part["methods"]) for part in parts)
    return save_figure(folder / "differences.png", (width, 1.4 + rows_height(most)), 1, len(parts), pictures)


def _differences(axes, part: Mapping[str, Any]) -> None:
    unit, first = part["budget"]["unit"], part["yardstick"]
    shown = {label: numbers[f"difference_at_{unit}"] for label, numbers in part["methods"].items()
             if f"difference_at_{unit}" in numbers}
    shown = dict(sorted(shown.items(), key=lambda item: item[1]["mean"]))
    colors = {"better": COLORS[2], "worse": COLORS[3], "tie": "0.55"}
    for place, (_, one) in enumerate(shown.items()):
        axes.plot([one["low"], one["high"]], [place, place], color=colors[one["verdict"]], linewidth=2)
        axes.plot([one["mean"]], [place], "o", color=colors[one["verdict"]])
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(shown)), [shortened(label) for label in shown])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlabel(f"{part['contest']['metric']} minus {first}'s (grey: a tie)")
    axes.set_title(part["contest"]["name"])
