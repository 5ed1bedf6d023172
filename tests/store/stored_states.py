"""A state with leaves of every kind, its comparison, and saves in a process of their own."""

import os
import subprocess
import sys
import textwrap
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Counters(NamedTuple):
    seen: jax.Array
    nothing: None


@flax.struct.dataclass
class State:
    params: dict
    opt_state: tuple
    key: jax.Array
    keys: jax.Array
    counters: Counters
    empty: tuple


def make_state(scale=1.0, width=3):
    params = {
        "dense": {
            "kernel": scale * jnp.arange(2.0 * width).reshape(2, width),
            "bias": jnp.full(width, scale, jnp.bfloat16),
        }
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return State(
        params=params,
        opt_state=optimiser.init(params),
        key=jax.random.key(7),
        keys=jax.random.split(jax.random.key(8, impl="rbg"), 4),
        counters=Counters(jnp.int32(5), None),
        empty=(),
    )


def raw(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and raw(a).tobytes() == raw(e).tobytes()


def files_of(directory, step):
    return [os.path.join(root, name) for root, _, names in os.walk(directory / str(step)) for name in names]


def run_child(directory, body, prefix=(), flags=None):
    """Runs `body` in a process of its own with `checkpoints` open on `directory` (keep=1) and step 1 safely saved."""
    head = f"""
        import os, signal, sys, threading, time
        import jax, jax.numpy as jnp, numpy as np
        from jaxrl_llm.store.checkpoints import Checkpoints
        checkpoints = Checkpoints({str(directory)!r}, keep=1)
        checkpoints.save(1, {{"w": jnp.arange(8.0)}}, host="good")
        checkpoints.wait()
        big = {{"w": jnp.asarray(np.random.default_rng(0).standard_normal(4_000_000), jnp.float32)}}
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    if flags is not None:
        environment["XLA_FLAGS"] = flags
    return subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
