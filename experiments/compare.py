"""Compares methods at equal compute: runs a list of methods with several seeds and writes a report.

  python experiments/compare.py --config=configs/arithmetic.py --methods=grpo,rloo,dapo --seeds=0,1,2 \\
      --budget=tokens=2e6 --out=runs/three_methods [--config.model.hidden_size=64 ...]

  python experiments/compare.py --suite=embedded --parallel=2 --out=runs/suite

The same command continues what was interrupted, retries what failed and renews the report. See docs/comparing.md.
"""
import json
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "What all runs share, e.g. configs/arithmetic.py.")
_SUITE = flags.DEFINE_string("suite", "", "In the place of --config: embedded, three tasks of about a minute a run; "
                             "or some of them, embedded:mixed,lengths.")
_METHODS = flags.DEFINE_string("methods", None, "Catalogue names, in brackets what differs: grpo(sampling.group=8), rloo; "
                               "all: those that run by name. A suite has its own.")
_SEEDS = flags.DEFINE_list("seeds", None, "Testing seeds: every table is made of these. Default: 0,1,2, and "
                           "0 to 9 for a suite.")
_BUDGET = flags.DEFINE_string("budget", "", "What each run may spend: tokens=2e6, flops=1e13, seconds=120 or steps=200; "
                              "default: the steps of the configuration.")
_OUT = flags.DEFINE_string("out", None, "Folder of the report and of all runs.")
_GRID = flags.DEFINE_string("grid", None, "Settings to choose from for every method: optimizer.learning_rate=1e-4|3e-4, ... "
                            "Default: none, and three learning rates for a suite; --grid= turns tuning off.")
_TRIALS = flags.DEFINE_integer("trials", 0, "Random search in the place of the grid: this number of settings, the one as "
                               "configured and random points of --grid, in which a..b is a range, logarithmic.", lower_bound=0)
_TEST_ALL = flags.DEFINE_bool("test_all", False, "With --grid: also run the settings that were not kept on the testing seeds, "
                              "which shows what the choice cost. All other tables are those of the kept ones.")
_TUNING_SEEDS = flags.DEFINE_list("tuning_seeds", ["1000", "1001"], "Seeds that the choice in --grid is made on.")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "Runs at a time.", lower_bound=1)
_SHARE = flags.DEFINE_string("share", "1/1", "For launchers: 2/8 starts every eighth run, from the second on.")
_ONLY_REPORT = flags.DEFINE_bool("only_report", False, "Start nothing: report on the runs that are there.")


def run(jobs, budget, out: Path, what: str) -> str:
    """Runs the jobs, unless nothing is to be started; returns what failed, in words."""
    from jaxrl_llm.compare import launch, plan
    for job in jobs:
        plan.check_folder(job, budget)
    if _ONLY_REPORT.value:
        return ""
    options = [f"--compilation_cache={flags.FLAGS.compilation_cache}", f"--warm_starts={out / 'warm_starts'}"]
    own = plan.share(jobs, _SHARE.value)
    failed = launch.run_all(own, budget, parallel=_PARALLEL.value, options=options)
    return f"{len(failed)} of {len(own)} {what} failed" if failed else ""


def tune(entries, budget, out: Path, metric: str):
    """The settings with the best held-out metric by method, the points of the search, the report's part on it, failures."""
    from jaxrl_llm.compare import plan, report
    from jaxrl_llm.evaluation import comparison
    grid, seeds = settings(), [int(s) for s in _TUNING_SEEDS.value]
    points = [[plan.tuned(entry, choice) for entry in entries] for choice in grid]
    jobs = [job for i, row in enumerate(points) for job in plan.jobs_of(row, seeds, budget, out / "tuning" / str(i))]
    print(f"tuning: {len(grid)} settings x {len(seeds)} seeds x {len(entries)} methods")
    failed, chosen, facts = run(jobs, budget, out, "tuning runs"), [], {}
    for column, entry in enumerate(entries):
        scores = [report.finals_by_seed([j for j in jobs if j.entry is row[column]], budget, seeds, metric)
                  for row in points]
        best = comparison.choose(scores)
        chosen.append(best)
        facts[entry.label] = report.tuning(grid, best, seeds, scores, bool(_TRIALS.value), metric)
    return chosen, points, facts, failed


def settings():
    """The points of --grid, or those that --trials draws."""
    from jaxrl_llm.compare import plan
    return plan.draw_settings(_GRID.value, _TRIALS.value) if _TRIALS.value else plan.read_grid(_GRID.value)


def testing_jobs(entries, seeds, budget, out: Path, setting: int):
    """The testing runs of a setting: a choice that changes, as a search grows or a failed run succeeds, has other folders."""
    from jaxrl_llm.compare import plan
    return plan.jobs_of(entries, seeds, budget, out / "testing" / str(setting))


def test_all(points, tuning, budget, out: Path, metric: str) -> str:
    """Runs every setting on the testing seeds, and adds the cost of the choice to the report's part on tuning."""
    from jaxrl_llm.compare import report
    seeds = [int(s) for s in _SEEDS.value]
    jobs = [job for i, row in enumerate(points) for job in testing_jobs(row, seeds, budget, out, i)]
    failed = run(jobs, budget, out, "testing runs of other settings")
    for column, label in enumerate(tuning):
        table = [report.finals_by_seed([j for j in jobs if j.entry is row[column]], budget, seeds, metric) for row in points]
        tuning[label] |= report.protocol(tuning[label], table)
    return failed


def compare(entries, budget, out: Path, metric: str = "eval/score"):
    """Runs the entries with all seeds, tuned first if there is a grid, and reports: (results, report, list of failures).

    `metric`: the held-out metric by which settings are chosen.
    """
    from jaxrl_llm.compare import figures, page, plan, report
    for entry in entries:
        plan.check_schedule(entry, budget)
    out.mkdir(parents=True, exist_ok=True)
    seeds, tuning, failures = [int(s) for s in _SEEDS.value], {}, []
    if _GRID.value:
        chosen, points, tuning, failed = tune(entries, budget, out, metric)
        failures.append(failed)
        jobs = [job for seed in seeds for column, setting in enumerate(chosen)
                for job in testing_jobs([points[setting][column]], [seed], budget, out, setting)]
    else:
        jobs = plan.jobs_of(entries, seeds, budget, out / "runs")
    failures.append(run(jobs, budget, out, "runs"))
    if _TEST_ALL.value:
        failures.append(test_all(points, tuning, budget, out, metric))
    results, warnings = report.finished_runs(jobs, budget)
    results, idle = report.without_idle(results)
    warnings += idle
    if not results:
        raise RuntimeError("no run finished, so there is nothing to report:\n" + "\n".join(warnings))
    analysis = report.analyse(results, budget, warnings)
    for label, facts in tuning.items():
        if label in results:
            tested = report.scores_of(results[label], budget.unit, budget.size, metric)["final"].mean()
            facts["gap"] = max(x for x in facts["means"] if isinstance(x, float)) - float(tested)
    analysis |= {"tuning": tuning, "settings": report.settings(results), "facts": report.facts(results),
                 "command": _command()}
    (out / "report.json").write_text(json.dumps(analysis, indent=1, allow_nan=False))
    (out / "report.md").write_text(page.markdown(analysis))
    figures.draw_all(results, analysis, out)
    print(page.summary(analysis) + f"\nreport: {out}/report.md")
    return results, analysis, [failed for failed in failures if failed]


def _command() -> str:
    """The command line of this run; `--only_report`, which starts nothing, is no part of how results are made."""
    return shlex.join(["python", *(part for part in sys.argv if part != "--only_report")])


def compare_suite(out: Path) -> list[str]:
    """Runs every contest of the suite in its own folder, and writes the page on all that `out` holds; returns the failures."""
    from jaxrl_llm.compare import plan, suite
    parts, failures = suite.read(out), []
    for contest in suite.contests(_SUITE.value):
        print(f"--- {contest.name}: {contest.about}")
        base = suite.config_of(contest)
        entries = plan.read_entries(_METHODS.value or suite.METHODS, base, suite.SETTINGS)
        if few := suite.too_few(len(_SEEDS.value), len(entries) - 1):
            print(f"note: {few}", file=sys.stderr)
        budget = plan.read_budget(_BUDGET.value or contest.budget, base)
        results, analysis, failed = compare(entries, budget, out / contest.name, contest.metric)
        failures += [f"{contest.name}: {one}" for one in failed]
        parts = suite.with_part(parts, suite.analyse(contest, results, analysis))
        suite.write(parts, out)
    print(f"report: {out}/README.md")
    return failures


def fill_in_defaults() -> None:
    """The seeds and the grid that are not given: those of the suite, or three seeds without tuning."""
    from jaxrl_llm.compare import suite
    if _SEEDS.value is None:
        flags.FLAGS["seeds"].value = list(suite.SEEDS) if _SUITE.value else ["0", "1", "2"]
    if _GRID.value is None:
        flags.FLAGS["grid"].value = suite.GRID if _SUITE.value else ""


def main():
    from jaxrl_llm.compare import plan
    from jaxrl_llm.store import bucket
    fill_in_defaults()
    base = _CONFIG.value
    if (base is None) == (not _SUITE.value):
        raise ValueError("give either --config, what all runs share, or --suite, several tasks that say it themselves")
    if base is not None and not _METHODS.value:
        raise ValueError("flag --methods=None: give the methods to compare, for example --methods=grpo,rloo,dapo")
    if _GRID.value and set(_SEEDS.value) & set(_TUNING_SEEDS.value):
        raise ValueError(f"--seeds={','.join(_SEEDS.value)} and --tuning_seeds={','.join(_TUNING_SEEDS.value)} share a seed: "
                         "a method would be tested on what it was tuned on")
    if (_TRIALS.value or _TEST_ALL.value) and not _GRID.value:
        raise ValueError("--trials and --test_all belong to a search: give its space, --grid=...")
    if _GRID.value and _SHARE.value != "1/1":
        raise ValueError("--share runs what is known from the start; with --grid the testing runs depend on all tuning runs")
    home = bucket.place(_OUT.value)
    with bucket.kept(home) as (out, _):
        if base is None:
            failures = compare_suite(out)
        else:
            failures = compare(plan.read_entries(_METHODS.value, base), plan.read_budget(_BUDGET.value, base), out)[2]
    if bucket.is_bucket(home):
        print(f"all that is in {out} lies in {home}")
    if failures:
        sys.exit("; ".join(failures) + "; the same command tries them again")


if __name__ == "__main__":
    command_line.run(main, "out")
