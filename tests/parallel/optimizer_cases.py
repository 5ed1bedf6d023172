"""Runs in a process of its own with four virtual devices: runs of Adafactor on a mesh, one interrupted and resumed."""
import json
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm.learning import offload
from jaxrl_llm.parallel import tree_shardings
from jaxrl_llm.runs import loop
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.checkpoints import Checkpoints


def config(name: str, steps: int, **changes):
    c = default_config()
    c.task, c.rewards = "arithmetic(level=digit)", "format(pattern='(?s).*[a-z].*')"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 128, 2, 4, 128  # as large as to be factored
    c.steps, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = steps, 4, 4, 6
    c.eval.every, c.eval.problems, c.samples_every, c.checkpoint.every = 0, 4, 0, 1
    c.update_from_flattened_dict({"mesh.data": 1, "mesh.fsdp": 2, "mesh.tensor": 2, "optimizer.name": name,
                                  "optimizer.learning_rate": 1e-2, **changes})
    return c


def end_of(folder: Path, c):
    """`(state, as it was laid out)` of the last checkpoint, in the layout of its run and in its memory kind."""
    run, params = setup.build(c)
    target = offload.moments_away(run.learner.offload, setup.initial_state(run, params))
    with Checkpoints(folder / "checkpoints", read_only=True) as store:
        state = store.restore(target).state
    wanted = tree_shardings(state, run.learner.mesh)
    return state, all(x.sharding.spec == s.spec for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(wanted)))


def numbers(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]


def case(name: str, folder: Path) -> dict:
    loop.train(config(name, 3), folder / "straight")
    away = {"learner.offload": "optimizer"}
    loop.train(config(name, 1, **away), folder / "broken")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.train(config(name, 3, **away), folder / "broken", True)
    straight, ruled = end_of(folder / "straight", config(name, 3))
    broken, ruled_too = end_of(folder / "broken", config(name, 3, **away))
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): [x.shape, x.addressable_shards[0].data.shape]
              for path, x in jax.tree.leaves_with_path(broken.opt_state)}
    return {"same": all(bool((a == b).all()) for a, b in zip(numbers(straight), numbers(broken), strict=True)),
            "as_ruled": ruled and ruled_too,
            "kinds": sorted({x.sharding.memory_kind for x in jax.tree.leaves(broken.opt_state)}),
            "shapes": {path: shape for path, shape in shapes.items() if path.endswith(("q/kernel", "attention_norm/scale"))}}


def main():
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({name: case(name, Path(folder, name)) for name in ("adafactor", "muon")}))


if __name__ == "__main__":
    sys.exit(main())
