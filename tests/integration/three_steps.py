"""Three steps of a row by its name on the tiny model, in two updates of each batch."""
import jax
import numpy as np
import tiny_config

from jaxrl_llm.learning import schedules
from jaxrl_llm.setup import setup


def taken(method, **changes):
    """`(metrics of each step, whether the weights moved)`; `changes`: further keys of the configuration."""
    config = tiny_config.get_config()
    config.update_from_flattened_dict({"method": method, "model.num_layers": 1, "learner.minibatches": 2, **changes})
    run, params = setup.build(config)
    state = setup.initial_state(run, params)
    before = jax.device_get(state.params)
    metrics = []
    for _, step in zip(range(3), schedules.make("sync").steps(run.source, run.learner, state)):
        metrics.append(step.learned.metrics)
        state = step.learned.state
    return metrics, any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params)))
