"""Files of finished and of killed runs, for comparisons; problems in a given order; rewards with a replaced function."""
import itertools
import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm.rewards import Combined
from jaxrl_llm.runs import loop, phases
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


def assert_resumes_exactly(folder, make_config, step):
    """A run that resumes without its checkpoint of a step ends with the weights and finite metrics of the straight run."""
    loop.train(make_config(), folder / "straight")
    shutil.copytree(folder / "straight", folder / "resumed")
    shutil.rmtree(folder / f"resumed/checkpoints/{step}")
    loop.train(make_config(), folder / "resumed", resume=True)
    assert_same(*(saved(folder / name, make_config()) for name in ("resumed", "straight")))
    kept = [[repeatable(line) for line in lines(folder / name)] for name in ("resumed", "straight")]
    assert kept[0] == kept[1] and all(np.isfinite(list(line.values())).all() for line in kept[0])


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


def left_behind(config, workdir, resume=False, phase="", step=-1):
    """The evaluations of a run that is trained here, with copies of what a process that is killed leaves.

    `workdir`-PHASE is of one that dies where this phase has begun, `workdir`-STEP of one that dies after the line of this step,
    in which its newest checkpoint was written.
    """
    entered, write, open_session, stores = phases.entered, loop._Session.write, loop._Session.__init__, []

    def copy(name):
        stores[-1].wait()
        shutil.copytree(workdir, workdir.with_name(f"{workdir.name}-{name}"))

    def begin(session, desk, *rest):
        stores.append(desk.checkpoints)
        open_session(session, desk, *rest)

    def enter(course, last, work):
        result = entered(course, last, work)
        if course.phase.name == phase:
            copy(phase)
        return result

    def written(session, number, metrics):
        write(session, number, metrics)
        if number == step:
            copy(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "entered", enter)
        patch.setattr(loop._Session, "write", written)
        patch.setattr(loop._Session, "__init__", begin)
        return loop.train(config, workdir, resume)
