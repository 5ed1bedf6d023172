"""Measures a trained policy on the held-out problems of its task.

  python experiments/evaluate.py --workdir=runs/first [--problems=200] [--temperature=0]
"""
import json
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from jaxrl_llm import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of experiments/train.py.")
_PROBLEMS = flags.DEFINE_integer("problems", 200, "Held-out problems, at most; a group of completions is drawn for each.")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Sampling temperature; default: that of training. 0 is greedy.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")


def main():
    import jax

    from jaxrl_llm.training import loop, setup
    from jaxrl_llm.training.checkpoints import Checkpoints
    from jaxrl_llm.training.report import print_report
    workdir = Path(_WORKDIR.value)
    if not (workdir / "config.json").is_file():
        raise FileNotFoundError(f"{workdir} is no run folder: config.json is missing; give the --workdir of a training run")
    config = ConfigDict(json.loads((workdir / "config.json").read_text())["config"])
    run, params = setup.build(config)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore(setup.initial_state(run, params))
    temperature = config.sampling.temperature if _TEMPERATURE.value is None else _TEMPERATURE.value
    found = loop.evaluate(run, restored.state.params, restored.state.lora, problems=_PROBLEMS.value,
                          key=jax.random.key(_SEED.value), temperature=temperature)
    print_report({f"step {restored.step}, temperature {temperature:g}": found}, workdir)
    path = workdir / f"evaluation_step{restored.step}_temperature{temperature:g}_seed{_SEED.value}.json"
    facts = found.metrics() | {"problems": len(found.sampled.problems), "step": restored.step}
    path.write_text(json.dumps(facts, indent=2))
    print(f"wrote {path}")


if __name__ == "__main__":
    command_line.run(main, "workdir")
