"""Measures a policy on the held-out problems of its task: that of a run, or the untrained one of a configuration.

  python experiments/evaluate.py --workdir=runs/first [--problems=200] [--temperature=0]
  python experiments/evaluate.py --config=configs/arithmetic.py:smollm2 [--config.model.path=DIR ...]
"""
import json
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of experiments/train.py; its newest checkpoint is measured.")
_CONFIG = config_flags.DEFINE_config_file("config", None, "Without --workdir: measure the model of this configuration.")
_PROBLEMS = flags.DEFINE_integer("problems", 200, "Held-out problems, at most; a group of completions is drawn for each.",
                                 lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Sampling temperature; default: that of training. 0 is greedy.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")


def policy_of(workdir: str | None, config: ConfigDict | None):
    """`(run, params, lora, step)` of a run folder's newest checkpoint, or of a configuration before any training."""
    from jaxrl_llm.training import setup
    from jaxrl_llm.training.checkpoints import Checkpoints
    if workdir is not None and config is not None:
        raise ValueError("give --workdir (a trained policy) or --config (an untrained one), not both")
    if workdir is None:
        if config is None:
            raise ValueError("nothing to measure: give --workdir=RUN_FOLDER or --config=FILE")
        run, params = setup.build(config)
        return run, params, None, 0
    stored = Path(workdir) / "config.json"
    if not stored.is_file():
        raise FileNotFoundError(f"{workdir} is no run folder: config.json is missing; give the --workdir of a training run")
    run, params = setup.build(ConfigDict(json.loads(stored.read_text())["config"]))
    with Checkpoints(Path(workdir) / "checkpoints", read_only=True) as checkpoints:
        found = checkpoints.restore(setup.initial_state(run, params))
    return run, found.state.params, found.state.lora, found.step


def main():
    import jax

    from jaxrl_llm.training import loop
    from jaxrl_llm.training.report import print_table
    run, params, lora, step = policy_of(_WORKDIR.value, _CONFIG.value)
    temperature = run.config.sampling.temperature if _TEMPERATURE.value is None else _TEMPERATURE.value
    found = loop.evaluate(run, params, lora, problems=_PROBLEMS.value, key=jax.random.key(_SEED.value),
                          temperature=temperature)
    print_table({f"step {step}, temperature {temperature:g}": found})
    if _WORKDIR.value:
        path = Path(_WORKDIR.value) / f"evaluation_step{step}_temperature{temperature:g}_seed{_SEED.value}.json"
        facts = found.metrics() | {"problems": len(found.sampled.problems), "step": step}
        path.write_text(json.dumps(facts, indent=2))
        print(f"wrote {path}")


if __name__ == "__main__":
    command_line.run(main)
