"""Runs in a process of its own with eight virtual devices: what every estimator sends between shards of a batch, as JSON."""
import json

import jax
import numpy as np
import property_inputs as inputs

from jaxrl_llm import advantages, parallel
from jaxrl_llm.learning.learner import estimate
from jaxrl_llm.planning import communication

P, G, T = 16, 4, 64


def sent(mesh, batch, case, slug: str) -> float:
    """Bytes that a device sends, in copies of one f32[P, G]."""
    estimator = advantages.make(slug, **case.hyper)
    own = jax.tree.map(inputs.as_array, dict(case.inputs(np.random.default_rng(0), P, G, T)))
    def place(x):
        return jax.device_put(x, parallel.batch_sharding(mesh)) if np.shape(x)[:1] == (P,) else x
    state = parallel.put(estimator.init(), parallel.tree_shardings(estimator.init(), mesh))
    text = estimate.lower(estimator, mesh, jax.tree.map(place, batch.replace(**own)), state).compile().as_text()
    return sum(one.sent for one in communication.collectives(text, unknown_trips=1)) / (4 * P * G)


def main():
    mesh, cases, batch = parallel.make_mesh(data=8), inputs.load("ESTIMATORS"), inputs.batch(0, inputs.Case(), (P, G, T))
    print(json.dumps({slug: sent(mesh, batch, cases.get(slug, [inputs.Case()])[0], slug) for slug in advantages.names()}))


if __name__ == "__main__":
    main()
