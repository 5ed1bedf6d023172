"""Measures a policy on held-out problems: the policy of a run, or the untrained one of a configuration.

  python experiments/evaluate.py --workdir=runs/first [--problems=200] [--samples=64] [--temperature=0]
  python experiments/evaluate.py --config=configs/arithmetic.py --out=runs/base [--config.model.path=DIR ...]
  python experiments/evaluate.py --workdir=runs/first --against=runs/base        # a paired test on the same problems

It reports pass@k, votes (maj@k), lengths and rates with 95% intervals, by level if the task has levels. The same command
continues an interrupted measurement.
"""
import contextlib
import json
import re
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of experiments/train.py; its newest checkpoint is measured.")
_STEP = flags.DEFINE_integer("step", None, "With --workdir: the checkpoint of this step.")
_BEST = flags.DEFINE_bool("best", False, "With --workdir: the weights that config.checkpoint.best kept.")
_AVERAGE = flags.DEFINE_bool("average", False, "With --workdir: the moving average that config.optimizer.ema kept.")
_CONFIG = config_flags.DEFINE_config_file("config", None, "Without --workdir: measure the model of this configuration.")
_TASK = flags.DEFINE_string("task", None, "Another task than the configured one, with its own rewards, for example "
                            "arithmetic(level=mixed).")
_PROBLEMS = flags.DEFINE_integer("problems", None, "Held-out problems, at most; default: eval.problems, those of training. "
                                 "More have these among them.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 1, "Completions per problem; whole groups are drawn, and the first of them counted.",
                                lower_bound=1)
_UNTIL = flags.DEFINE_integer("until", 0, "For tiny success rates: sample a problem until it is solved so often (2 is usual), "
                              "or --samples times.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Sampling temperature; default: that of training. 0 is greedy.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
_OUT = flags.DEFINE_string("out", None, "Folder of completions, numbers and picture; default with --workdir: a folder in it.")
_AGAINST = flags.DEFINE_string("against", None, "Folder of another measurement on the same problems: the paired difference.")


def measured_policy():
    """The policy that the flags name."""
    from jaxrl_llm.runs.trained import trained, untrained, with_task
    from jaxrl_llm.store import bucket
    workdir, config = _WORKDIR.value, _CONFIG.value
    if workdir is not None and config is not None:
        raise ValueError("give --workdir (a trained policy) or --config (an untrained one), not both")
    if workdir is not None:
        return trained(bucket.place(workdir), _STEP.value, _TASK.value, _BEST.value, _AVERAGE.value)
    if config is None:
        raise ValueError("nothing to measure: give --workdir=RUN_FOLDER or --config=FILE")
    given = ["--step"] * (_STEP.value is not None) + ["--best"] * _BEST.value + ["--average"] * _AVERAGE.value
    if given:
        raise ValueError(f"--config has no checkpoints, so {', '.join(given)} would have no effect; give --workdir=RUN_FOLDER "
                         "instead of --config, or set --config.model.path=RUN_FOLDER/checkpoints/STEP")
    if _TASK.value:
        with_task(config, _TASK.value)
    return untrained(config)


def folder_of(step: int, temperature: float):
    """The folder in which the measurement is kept, maybe in a bucket; None for a configuration without --out."""
    from jaxrl_llm.store import bucket
    if _OUT.value:
        return bucket.place(_OUT.value)
    if not _WORKDIR.value:
        return None
    task = "_" + re.sub(r"\W+", "_", _TASK.value).strip("_") if _TASK.value else ""
    average = "_average" if _AVERAGE.value else ""
    name = f"evaluation_step{step}{average}_temperature{temperature:g}_seed{_SEED.value}{task}"
    return bucket.place(_WORKDIR.value) / name


def main():
    from jaxrl_llm.store import bucket
    run = measured_policy()
    temperature = run.config.sampling.temperature if _TEMPERATURE.value is None else _TEMPERATURE.value
    home = folder_of(run.step, temperature)
    with contextlib.nullcontext((None, None)) if home is None else bucket.kept(home) as (folder, _):
        measure(run, temperature, folder, home)


def measure(run, temperature: float, folder: Path | None, home) -> None:
    """Draws what is not in `folder` yet, and prints and keeps the measurement; `home` is the folder's name for the reader."""
    import jax

    from jaxrl_llm.compare import evaluation_page, held_out
    from jaxrl_llm.evaluation import summary
    from jaxrl_llm.store import bucket
    step, problems = run.step, _PROBLEMS.value or run.config.eval.problems
    if _UNTIL.value and _AGAINST.value:
        raise ValueError("--until draws another number of completions for each problem, which --against cannot pair; give one")
    header = held_out.header_of(run, problems=problems, temperature=temperature, seed=_SEED.value)
    against = bucket.local(_AGAINST.value) if _AGAINST.value else None
    other, theirs = held_out.measured(against, header["task"]) if against else ({}, None)  # fails before sampling
    what = {**header, "model": run.config.model.path, "workdir": _WORKDIR.value, "average": _AVERAGE.value}
    file = folder / held_out.FILE if folder else None
    rows = held_out.draw(
        run.source, run.params, run.lora, problems=problems, samples=_SAMPLES.value, temperature=temperature,
        until=_UNTIL.value, key=jax.random.key(_SEED.value), say=print, done=held_out.stored(file, header) if file else (),
        keep=(lambda rows: held_out.append(file, rows)) if file else lambda rows: None)
    joined = held_out.by_problem(rows, None if _UNTIL.value else _SAMPLES.value)
    asked = len({row["problem"] for row in rows})
    if not joined:
        raise RuntimeError(f"the environment lost the trajectories of all problems ({asked}), so there is nothing to measure; "
                           "mend the environment and measure again, with another --out")
    if len(joined) < asked:
        print(f"{asked - len(joined)} of {asked} problems have no completion and are left out: the environment lost them all")
    title = f"step {step}, temperature {temperature:g}"
    if _UNTIL.value:
        facts = {**what, "until": summary.measure_until(joined, _UNTIL.value)}
        evaluation_page.print_until(title, facts["until"])
    else:
        facts = {**what, "all": summary.measure(joined), "levels": summary.by_level(joined)}
        if theirs is not None:
            facts["against"] = {"file": _AGAINST.value, "differing": held_out.differing(header, other),
                                **summary.compare(joined, theirs)}
        evaluation_page.print_evaluation(title, facts)
    if folder:
        file = folder / ("until.json" if _UNTIL.value else "evaluation.json")
        file.write_text(json.dumps(facts, indent=1, allow_nan=False))
        if not _UNTIL.value:
            evaluation_page.draw(facts, folder / "pass_at_k.png")
        print(f"wrote {home}/{file.name}")


if __name__ == "__main__":
    command_line.run(main)
