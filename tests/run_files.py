"""The files of a finished run, for comparisons; problems in a given order; rewards with a replaced function."""
import itertools
import json

import jax
import numpy as np

from jaxrl_llm.rewards import Combined
from jaxrl_llm.setup import setup
from jaxrl_llm.store.checkpoints import Checkpoints


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def repeatable(line):
    measured = ("time/", "host/", "speed/", "environment/seconds", "environment/slowest")
    return {name: value for name, value in line.items() if not name.startswith(measured)}


def saved(workdir, config, step=None):
    """The leaves of a checkpoint by name, on the host."""
    run, params = setup.build(config)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        state = checkpoints.restore(setup.initial_state(run, params), step).state
    state = state.replace(key=jax.random.key_data(state.key))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def assert_same(result, wanted):
    assert result.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(result[name], wanted[name], err_msg=name)


class Given:
    """The data of a source: these problems in this order, again and again."""

    def __init__(self, problems):
        self._rest = itertools.cycle(problems)

    def take(self, count):
        return list(itertools.islice(self._rest, count))


def called(reward, function):
    """The reward with another function for its scoring."""
    kind = type("Called", (Combined,), {"__call__": lambda self, *arguments: function(*arguments)})
    return kind(reward.rewards, reward.on_error, reward.deadline)
