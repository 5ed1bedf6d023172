"""How much an estimator needs beside its inputs and its result; compiled, not run."""

import jax
import property_inputs as inputs

from jaxrl_llm import advantages

SHAPE = P, G, T = 16, 8, 256
ROWS, IDS = inputs.parameters("ESTIMATORS", advantages.names())


@inputs.each("slug, case", ROWS, ROWS, IDS)
def test_at_most_five_copies_of_a_float_per_token(slug, case):
    """And one of the state, which a prompt of the batch changes in one place."""
    estimator = advantages.make(slug, **case.hyper)
    arguments = inputs.batch(0, case, SHAPE), estimator.init()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    memory = jax.jit(estimator.update).lower(*shapes).compile().memory_analysis()
    state = sum(x.nbytes for x in jax.tree.leaves(arguments[1]))
    assert memory.temp_size_in_bytes <= 5 * 4 * P * G * T + state
