"""Writes the results of policies on prompts as a TFDS data set in ArrayRecord, on which the value model V0 is trained.

  python experiments/record_history.py --runs=runs/a,runs/b --out=runs/history
      Every checkpoint of every run answers the same problems (keep many: --config.checkpoint.keep=100 when training).
  python experiments/record_history.py --runs=runs/a,runs/b --out=runs/history --source=samples
      Nothing is generated: the completions that the runs wrote down are read.
"""
from absl import flags

from jaxrl_llm.commands import command_line

_RUNS = flags.DEFINE_list("runs", None, "Folders of experiments/train.py.")
_OUT = flags.DEFINE_string("out", None, "Folder for the data set.")
_SOURCE = flags.DEFINE_enum("source", "checkpoints", ("checkpoints", "samples"), "Where outcomes come from.")
_PROBLEMS = flags.DEFINE_integer("problems", 256, "Problems that each checkpoint answers, half of them held out from training.",
                                 lower_bound=4)
_REPEATS = flags.DEFINE_integer("repeats", 1, "Groups of completions per problem and checkpoint; outcomes are their mean.",
                                lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the completions.")


def main():
    import jax

    from jaxrl_llm.experiments.value_parts import fleet
    from jaxrl_llm.tasks.base import optional
    from jaxrl_llm.values import history
    optional("tensorflow_datasets", "data", "history")  # which keeps the results of long work
    rows = []
    for folder in _RUNS.value:
        if _SOURCE.value == "samples":
            completions = [(folder, step, prompt, right) for step, prompt, right in fleet.written_outcomes(folder)]
            print(f"{folder}: {len(completions)} completions")
            rows += completions
            continue
        for step, run, params, lora in fleet.checkpoints(folder):
            problems, key = fleet.problems_of(run, _PROBLEMS.value), jax.random.fold_in(jax.random.key(_SEED.value), step)
            answered = [pair for repeat in range(_REPEATS.value)
                        for pair in fleet.outcomes(run, params, lora, problems, jax.random.fold_in(key, repeat))]
            rows += [(folder, step, prompt, right) for prompt, right in answered]
            print(f"{folder} step {step}: {len(answered)} groups, score {sum(x for _, x in answered) / len(answered):.3f}",
                  flush=True)
    written = history.save(history.of_rows(rows), _OUT.value)
    print(f"wrote {len(rows)} outcomes of {len(_RUNS.value)} policies to {written}")


if __name__ == "__main__":
    command_line.run(main, "runs", "out")
