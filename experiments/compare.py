"""Which method is better, by how much, at equal compute: runs a list of methods with several seeds and writes a report.

  python experiments/compare.py --config=configs/arithmetic.py --methods=grpo,rloo,dapo --seeds=0,1,2 \\
      --budget=tokens=2e6 --out=runs/three_methods [--config.model.hidden_size=64 ...]

The same command continues what was interrupted, retries what failed and renews the report. See docs/comparing.md.
"""
import json
import shlex
import sys
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm import command_line

_CONFIG = config_flags.DEFINE_config_file("config", None, "What all runs share, e.g. configs/arithmetic.py.")
_METHODS = flags.DEFINE_string("methods", None, "Catalogue names; in brackets what differs: grpo(sampling.group=8), rloo.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Testing seeds: every table is made of these.")
_BUDGET = flags.DEFINE_string("budget", "", "What each run may spend: tokens=2e6, flops=1e13, seconds=120 or steps=200; "
                              "default: the steps of the configuration.")
_OUT = flags.DEFINE_string("out", None, "Folder of the report and of all runs.")
_GRID = flags.DEFINE_string("grid", "", "Settings to choose from for every method: optimizer.learning_rate=1e-4|3e-4, ...")
_TUNING_SEEDS = flags.DEFINE_list("tuning_seeds", ["1000", "1001"], "Seeds that the choice in --grid is made on.")
_PARALLEL = flags.DEFINE_integer("parallel", 1, "Runs at a time.", lower_bound=1)
_SHARE = flags.DEFINE_string("share", "1/1", "For launchers: 2/8 starts every eighth run, from the second on.")
_ONLY_REPORT = flags.DEFINE_bool("only_report", False, "Start nothing: report on the runs that are there.")


def tune(entries, budget, out: Path, options):
    """The entries with their best grid point, and what the report says about the choice."""
    from jaxrl_llm.compare import launch, plan, report
    from jaxrl_llm.evaluation import comparison
    grid, seeds = plan.read_grid(_GRID.value), [int(s) for s in _TUNING_SEEDS.value]
    points = [[plan.tuned(entry, choice) for entry in entries] for choice in grid]
    jobs = [job for i, row in enumerate(points) for job in plan.jobs_of(row, seeds, budget, out / "tuning" / str(i))]
    for job in jobs:
        plan.check_folder(job, budget)
    if not _ONLY_REPORT.value:
        print(f"tuning: {len(grid)} settings x {len(seeds)} seeds x {len(entries)} methods")
        launch.run_all(jobs, budget, parallel=_PARALLEL.value, options=options)
    chosen, facts = [], {}
    for column, entry in enumerate(entries):
        scores = [report.finals_by_seed([j for j in jobs if j.entry is row[column]], budget, seeds) for row in points]
        best = comparison.choose(scores)
        chosen.append(points[best][column])
        texts = [", ".join(f"{key}={value}" for key, value in choice.items()) for choice in grid]
        means = [float(sum(row) / len(row)) for row in scores]
        facts[entry.label] = {"seeds": seeds, "grid": texts, "chosen": texts[best], "scores": report.plain(scores),
                              "means": report.plain(means)}
    return chosen, facts


def main():
    from jaxrl_llm.compare import figures, launch, page, plan, report
    base, out = _CONFIG.value, Path(_OUT.value)
    entries = plan.read_entries(_METHODS.value, base)
    budget = plan.read_budget(_BUDGET.value, base)
    seeds = [int(s) for s in _SEEDS.value]
    if _GRID.value and set(seeds) & {int(s) for s in _TUNING_SEEDS.value}:
        raise ValueError(f"--seeds={','.join(_SEEDS.value)} and --tuning_seeds={','.join(_TUNING_SEEDS.value)} share a seed: "
                         "a method would be tested on what it was tuned on")
    if _GRID.value and _SHARE.value != "1/1":
        raise ValueError("--share runs what is known from the start; with --grid the testing runs depend on all tuning runs")
    for entry in entries:
        plan.check_schedule(entry, budget)
    out.mkdir(parents=True, exist_ok=True)
    options = [f"--compilation_cache={flags.FLAGS.compilation_cache}"]
    tuning = {}
    if _GRID.value:
        entries, tuning = tune(entries, budget, out, options)
    jobs = plan.jobs_of(entries, seeds, budget, out / "runs")
    for job in jobs:
        plan.check_folder(job, budget)
    own = plan.share(jobs, _SHARE.value)
    failed = [] if _ONLY_REPORT.value else launch.run_all(own, budget, parallel=_PARALLEL.value, options=options)
    results, warnings = report.finished_runs(jobs, budget)
    results, idle = report.without_idle(results)
    warnings += idle
    if not results:
        raise RuntimeError("no run finished, so there is nothing to report:\n" + "\n".join(warnings))
    found = report.analyse(results, budget, warnings)
    for label, facts in tuning.items():
        if label in results:
            facts["gap"] = max(x for x in facts["means"] if isinstance(x, float)) - found["methods"][label]["final_mean"]
    found |= {"tuning": tuning, "settings": report.settings(results), "facts": report.facts(results),
              "command": shlex.join(["python", *sys.argv])}
    (out / "report.json").write_text(json.dumps(found, indent=1, allow_nan=False))
    (out / "report.md").write_text(page.markdown(found))
    figures.draw_all(results, found, out)
    print(page.summary(found) + f"\nreport: {out}/report.md")
    if failed:
        sys.exit(f"{len(failed)} of {len(own)} runs failed; the same command tries them again")


if __name__ == "__main__":
    command_line.run(main, "config", "methods", "out")
