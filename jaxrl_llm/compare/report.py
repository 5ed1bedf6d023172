"""From finished runs to numbers, and from numbers to a page: everything in a report is in `report.json`."""
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.compare.launch import last_words, used
from jaxrl_llm.compare.ledger import RunMetrics, read_run
from jaxrl_llm.compare.plan import UNITS, Budget, Job
from jaxrl_llm.evaluation import comparison, hyperparameters
from jaxrl_llm.evaluation.paired import paired_difference
from jaxrl_llm.evaluation.rates import pass_at_k
from jaxrl_llm.setup.stored import stored_config, whole_config
from jaxrl_llm.store.workdir import config_changes, starts_of
from jaxrl_llm.tools import files

METRIC, SOLVED = "eval/score", "eval/solved"
POINTS = 101  # of a curve
MOST_SHOWN = 12  # methods, those of the highest means, of curves and of tables with a column for each; all are in the others
# Of the best method's gain: what "budget to reach" asks for.
REACH = 0.8
# Metrics of parts that act only where there is something to do: the value of a step without, and what a whole run of it means.
IDLE = {"replay/share": (0.0, "nothing was replayed"), "filter/kept": (1.0, "its filter dropped no prompt"),
        "guide/share": (0.0, "no completion was guided"), "pool/groups": (0.0, "no group of another run was used")}


class RunResult(NamedTuple):
    """A finished run: its job and its measurements."""

    job: Job
    run: RunMetrics


def finished_runs(jobs: Sequence[Job], budget: Budget) -> tuple[dict[str, list[RunResult]], list[str]]:
    """The finished runs of each contestant, and a warning for each one that is not."""
    results, warnings = {job.entry.label: [] for job in jobs}, []
    for job in jobs:
        share = used(job.folder, budget)
        if share.done:
            results[job.entry.label].append(RunResult(job, read_run(job.folder)))
        else:
            warnings.append(f"{job.title} is not finished ({share.now:.0%} of the budget) and is left out: "
                            f"{last_words(job.folder)}")
    missing = [label for label, runs in results.items() if not runs]
    warnings += [f"{label} has no finished run and is left out" for label in missing]
    return {label: runs for label, runs in results.items() if runs}, warnings


def curves(runs: Sequence[RunResult], unit: str, budget: float, metric: str = METRIC) -> tuple[np.ndarray, np.ndarray]:
    """`metric` of each run on a common grid of `unit` from 0 to `budget`: `x [POINTS]`, `y [S, POINTS]`."""
    x = np.linspace(0, budget, POINTS)
    absent = np.full(POINTS, np.nan)
    return x, np.array([comparison.at_budget(r.run.spent[unit], r.run.metrics[metric], x) if metric in r.run.metrics
                        else absent for r in runs])


def analyse(results: Mapping[str, list[RunResult]], budget: Budget, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """All numbers of the report as plain JSON values."""
    everyone = [result for runs in results.values() for result in runs]
    common = {unit: min(result.run.evaluated(unit) for result in everyone) for unit in UNITS}
    common[budget.unit] = budget.size
    start = float(np.mean([result.run.metrics[METRIC][0] for result in everyone]))
    finals = {label: scores_of(runs, *budget)["final"] for label, runs in results.items()}
    target = start + REACH * (max(float(comparison.iqm(x)) for x in finals.values()) - start)
    shared = set.intersection(*(set(result.run.metrics) for result in everyone))
    rows = {label: method_numbers(runs, budget, common, target) | {"own": own_metrics(runs, budget, shared)}
            for label, runs in results.items()}
    order = sorted(rows, key=lambda label: -rows[label]["final"]["value"])
    shown = order[:MOST_SHOWN]
    def pairs(compare, columns):
        return {a: {b: compare(a, b) for b in columns if b != a} for a in shown}
    return {
        "budget": budget._asdict(), "common": common, "target": target, "start": start,
        "order": order, "shown": shown, "methods": {label: rows[label] for label in order},
        "improvement": pairs(lambda a, b: _interval(comparison.improvement(finals[a], finals[b])), shown),
        "differences": pairs(lambda a, b: difference(results[a], results[b], budget), order),
        "idle": [label for label, runs in results.items() if any(idle_parts(result.run) for result in runs)],
        "warnings": [*warnings, *cautions(results), *doubts(results, budget)],
    }


def scores_of(runs: Sequence[RunResult], unit: str, budget: float, metric: str = METRIC) -> dict[str, np.ndarray]:
    """Per run `[S]` of a held-out metric: its value at the budget, the highest up to there, and mean of the curve."""
    pairs = [(r.run.spent[unit], r.run.metrics[metric]) for r in runs]
    final = np.array([float(comparison.at_budget(x, y, np.float64(budget))) for x, y in pairs])
    return {"final": final, "best": np.fmax(final, [comparison.best_within(x, y, budget) for x, y in pairs]),
            "mean": np.array([comparison.mean_within(x, y, budget) for x, y in pairs])}


def method_numbers(runs: Sequence[RunResult], budget: Budget, common: Mapping[str, float], target: float) -> dict[str, Any]:
    """One contestant's part of the report."""
    scores = scores_of(runs, *budget)
    numbers = {name: _interval(comparison.mean_over_runs(values)) for name, values in scores.items()}
    starts = np.array([r.run.metrics[METRIC][0] for r in runs])
    spent = {unit: np.array([np.interp(budget.size, r.run.spent[budget.unit], r.run.spent[unit]) for r in runs])
             for unit in UNITS}
    reached = np.array([comparison.budget_to_reach(r.run.spent[budget.unit], r.run.metrics[METRIC], target) for r in runs])
    reached[reached > budget.size] = math.inf
    return numbers | {
        "final_solved": _interval(comparison.mean_over_runs(scores_of(runs, *budget, SOLVED)["final"])),
        "final_mean": float(scores["final"].mean()),
        "seeds": [r.job.seed for r in runs],
        "runs": [{"seed": r.job.seed, "folder": str(r.job.folder), **{name: float(x[i]) for name, x in scores.items()}}
                 for i, r in enumerate(runs)],
        "at_equal": {unit: _interval(comparison.mean_over_runs(scores_of(runs, unit, common[unit])["final"]))
                     for unit in UNITS},
        "spent": {unit: float(np.mean(values)) for unit, values in spent.items()},
        "gain_per": {unit: _interval(comparison.mean_over_runs((scores["final"] - starts) / values))
                     for unit, values in spent.items()},
        "to_reach": {"median": _json(float(np.median(reached))), "runs": int(np.isfinite(reached).sum())},
        "entropy": late_mean(runs, budget, "entropy"),
        "length": late_mean(runs, budget, "completion/length"),
        "truncated": late_mean(runs, budget, "completion/truncated"),
        "silent_groups": late_mean(runs, budget, "groups/all_equal"),
        "gradient_variance": late_mean(runs, budget, "adam_noise"),
        "pass_at": pass_at(runs, budget),
        "bootstrap": bootstrap_share(runs),
        "phases": phases(runs),
    }


def bootstrap_share(runs: Sequence[RunResult]) -> float | None:
    """Share of the training data of all runs with a simpler method's advantages; None for methods without such a start."""
    values = np.concatenate([r.run.metrics.get("bootstrap", np.zeros(0)) for r in runs])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def without_idle(results: Mapping[str, list[RunResult]]) -> tuple[dict[str, list[RunResult]], list[str]]:
    """The runs that left the bootstrap of their method, and a warning for each one that never did."""
    said = [f"{label} seed {result.job.seed} is left out: all its steps were bootstrap steps, in which it is a simpler method; "
            "run more of them" for label, runs in results.items() for result in runs if bootstrap_share([result]) == 1]
    left = {label: [result for result in runs if bootstrap_share([result]) != 1] for label, runs in results.items()}
    return {label: runs for label, runs in left.items() if runs}, said


def idle_parts(run: RunMetrics) -> list[str]:
    """Which parts of a method never acted in a run, by their metrics: filters, replay, guides, a pool."""
    filters = [name for name in run.metrics if name.startswith("filter/") and name.endswith("/dropped")]
    said = [text for name, (value, text) in IDLE.items() if _always(run, name, value)]
    return said + [f"filter {name.split('/')[1]} dropped no completion" for name in filters if _always(run, name, 0.0)]


def _always(run: RunMetrics, metric: str, value: float) -> bool:
    """Whether a metric has this value in all steps that have it; False for a run without it."""
    values = run.metrics.get(metric, np.zeros(0))
    values = values[np.isfinite(values)]
    return len(values) > 0 and bool((values == value).all())


def doubts(results: Mapping[str, list[RunResult]], budget: Budget) -> list[str]:
    """What makes single runs no evidence about their method: parts that never acted, no signal, a score that did not move."""
    said = []
    for label, runs in results.items():
        seeds: dict[str, list[str]] = {}
        for result, final in zip(runs, scores_of(runs, *budget)["final"]):
            flat = ["all groups had equal rewards"] * _always(result.run, "groups/all_equal", 1.0)
            flat += ["it ends at the score that it started from"] * math.isclose(final, result.run.metrics[METRIC][0])
            for text in [*idle_parts(result.run), *flat]:
                seeds.setdefault(text, []).append(str(result.job.seed))
        said += [f"{label}, seed{'s' * (len(own) > 1)} {', '.join(own)}: {text}" for text, own in seeds.items()]
    return said


def late_mean(runs: Sequence[RunResult], budget: Budget, metric: str) -> float | None:
    """Mean of a metric over the last tenth of the budget and all runs; None where no run has it."""
    values = []
    for result in runs:
        spent = result.run.spent[budget.unit]
        late = (spent > 0.9 * budget.size) & (spent <= budget.size)
        chosen = result.run.metrics.get(metric, np.full(len(spent), np.nan))[late]
        values += chosen[np.isfinite(chosen)].tolist()
    return float(np.mean(values)) if values else None


def own_metrics(runs: Sequence[RunResult], budget: Budget, shared: set[str]) -> dict[str, float]:
    """Late means of the metrics `part/name` specific to this contestant's method, which not all runs write."""
    names = dict.fromkeys(name for result in runs for name in result.run.metrics
                          if "/" in name and name not in shared and not name.startswith(("time/", "eval/", "max/")))
    means = {name: late_mean(runs, budget, name) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None}


def pass_at(runs: Sequence[RunResult], budget: Budget) -> dict[str, dict[str, float]] | None:
    """Mean unbiased pass@k over the runs for k = 1, 2, 4, ... before training and at the evaluation nearest to the budget.

    Counted from the completions of held-out evaluations that a run keeps; None where some are missing.
    """
    tables = {"before": [], "after": []}
    for result in runs:
        evaluated = np.isfinite(result.run.metrics[METRIC])
        steps, spent = result.run.metrics["step"][evaluated], result.run.spent[budget.unit][evaluated]
        for name, step in (("before", steps[0]), ("after", steps[np.abs(spent - budget.size).argmin()])):
            correct = held_out_correct(result.job.folder / "samples" / f"step_{step:06d}.jsonl")
            if correct is None:
                return None
            tables[name].append(correct)
    group = min(table.shape[1] for arrays in tables.values() for table in arrays)
    sizes = [2**i for i in range(int(math.log2(group)) + 1)]
    return {name: {str(k): float(np.mean([pass_at_k(table, k) for table in arrays])) for k in sizes}
            for name, arrays in tables.items()}


def held_out_correct(file: Path) -> np.ndarray | None:
    """Which completions on a page of samples solve their problem, `bool[problems, G]`.

    None without the page, and where groups are unequal: an environment lost trajectories, or one has several contexts.
    """
    rows: dict[int, list[bool]] = {}
    for line in files.lines(file.parent, file.name):
        row = json.loads(line)
        rows.setdefault(row["prompt_index"], []).append(row["solved"])
    return np.array([*rows.values()], bool) if len({len(own) for own in rows.values()}) == 1 else None


def phases(runs: Sequence[RunResult]) -> dict[str, float]:
    """Median seconds per step of each phase, over the steps of all runs that had no evaluation."""
    names = dict.fromkeys(name for r in runs for name in r.run.metrics if name.startswith("time/") and name != "time/step")
    def training(run):
        return (run.metrics["step"] > 0) & np.isnan(run.metrics[METRIC])
    shown = {}
    for name in names:
        values = np.concatenate([np.nan_to_num(r.run.metrics[name][training(r.run)]) for r in runs if name in r.run.metrics])
        shown[name.removeprefix("time/")] = float(np.median(values)) if len(values) else 0.0
    return {name: seconds for name, seconds in shown.items() if seconds > 0}


def difference(a: Sequence[RunResult], b: Sequence[RunResult], budget: Budget) -> dict[str, Any] | None:
    """The final score of `a` minus `b`, paired by the seeds that both have; None without one."""
    def by_seed(runs):
        return dict(zip([r.job.seed for r in runs], scores_of(runs, *budget)["final"]))
    ours, theirs = by_seed(a), by_seed(b)
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    test = paired_difference(np.array([ours[s] for s in shared]), np.array([theirs[s] for s in shared]))
    return test._asdict() | {"seeds": len(shared)}


def cautions(results: Mapping[str, list[RunResult]]) -> list[str]:
    """What a reader must know before believing the table."""
    counts = {label: len(runs) for label, runs in results.items()}
    said = []
    if len(set(counts.values())) > 1:
        said.append("methods have different numbers of finished seeds: " + ", ".join(f"{k}: {v}" for k, v in counts.items()))
    if min(counts.values()) < 3:
        said.append("fewer than three seeds: the intervals are unreliable")
    elif min(counts.values()) < 10:
        said.append("with few seeds a 95% bootstrap interval is too narrow (right in about 73, 89, 93% of cases for 3, 5, 10 "
                    "seeds), and a paired test of n seeds cannot give a p-value below 2^(1-n): read small differences as ties")
    return said


def finals_by_seed(jobs: Sequence[Job], budget: Budget, seeds: Sequence[int], metric: str = METRIC) -> list[float]:
    """A held-out metric at the budget for each seed; NaN where the run is not finished."""
    results, _ = finished_runs(jobs, budget)
    finished = [result for runs in results.values() for result in runs]
    by_seed = dict(zip([r.job.seed for r in finished], scores_of(finished, *budget, metric)["final"].tolist()))
    return [by_seed.get(seed, math.nan) for seed in seeds]


def tuning(grid: Sequence[Mapping[str, Any]], best: int, seeds: Sequence[int], scores: Sequence[Sequence[float]],
           drawn: bool, metric: str = METRIC) -> dict[str, Any]:
    """The report's part on a search: its settings (`drawn` at random or not), scores `[settings, seeds]` and sensitivity.

    `metric`: what the scores are of.
    """
    texts = [", ".join(f"{key}={value}" for key, value in choice.items()) or "as configured" for choice in grid]
    table = np.array(scores, np.float64)
    values = hyperparameters.by_value([choice for choice in grid if choice], table[[bool(choice) for choice in grid]])
    return {"metric": metric, "seeds": list(seeds), "grid": texts, "chosen": texts[best], "drawn": drawn, "runs": table.size,
            "scores": plain(table.tolist()), "means": plain(table.mean(axis=1).tolist()),
            "sensitivity": {name: _json(x) for name, x in hyperparameters.sensitivity(table)._asdict().items()},
            "by_value": {key: {value: _json(x) for value, x in means.items()} for key, means in values.items()}}


def protocol(search: Mapping[str, Any], test: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The cost of the choice, from scores `test [settings, testing seeds]` of every setting."""
    tune = np.array([[float(x) for x in row] for row in search["scores"]])
    outcome = hyperparameters.protocol(tune, np.array(test, np.float64))
    return {"test_scores": plain(test), "regret": _json(outcome.regret), "rank_correlation": _json(outcome.rank_correlation),
            "single_seed_regret": plain(outcome.single_seed_regret.tolist())}


def facts(results: Mapping[str, list[RunResult]]) -> str:
    """One paragraph: task, model, batch, evaluation and software of the first run."""
    run = next(iter(results.values()))[0]
    c = stored_config(run.job.folder)
    software = starts_of(run.job.folder)[-1]
    sizes = c.model.sizes or f"{c.model.num_layers} layers of width {c.model.hidden_size}"
    model = c.model.path or f"{sizes} from scratch"
    warm = f", after {c.warmup.steps} supervised steps" if c.warmup.steps else ""
    return (f"Task {c.task}; {model}{warm}; {c.prompts.per_step} prompts x {c.sampling.group} completions of at most "
            f"{c.sampling.max_tokens} tokens; learning rate {c.optimizer.learning_rate:g}; {c.eval.problems} held-out problems "
            f"every {c.eval.every} steps. jax {software['packages']['jax']}, {software['platform'].split('-')[0]}.")


def settings(results: Mapping[str, list[RunResult]]) -> dict[str, list[str]]:
    """Differences between the configuration of each contestant and that of the first one."""
    flat = {label: whole_config(runs[0].job.folder).to_dict() for label, runs in results.items()}
    first = next(iter(flat.values()))
    skip = ("method:", "seed:")
    return {label: [line for line in config_changes(first, values) if not line.startswith(skip)]
            for label, values in flat.items()}


def _interval(interval: comparison.Interval) -> dict[str, float | str]:
    return {name: _json(float(value)) for name, value in interval._asdict().items()}


def plain(values: Sequence) -> list:
    """Nested lists of numbers as JSON values."""
    return [plain(value) if isinstance(value, (list, tuple)) else _json(float(value)) for value in values]


def _json(value: float) -> float | str:
    """Strict JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)
