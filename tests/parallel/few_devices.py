"""Runs on some of the virtual devices of a process."""
import jax

from jaxrl_llm.setup import setup


def built(config, count: int):
    """`(run, params)` of a configuration on the first `count` devices."""
    real = jax.devices
    jax.devices = lambda *a: real(*a)[:count]
    try:
        return setup.build(config)
    finally:
        jax.devices = real
