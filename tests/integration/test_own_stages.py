"""A stage and a controller of one's own, in two files: the stage reads a knob that the package does not have."""
import dataclasses
import importlib
import sys

import numpy as np
import pytest
import tiny_config

from jaxrl_llm.control.base import CONTROLLERS
from jaxrl_llm.sampling.stages import STAGES, Stage
from jaxrl_llm.setup import setup

STAGE = '''
from jaxrl_llm.control.knobs import Knob
from jaxrl_llm.sampling.stages import Stage, stage


@stage
def shorter(*, most: float = 1.0):
    """Each token costs `token_cost`, up to `most`."""
    def grow(batch, source):
        rewards, ends = batch.forest.rewards.copy(), batch.new_ends
        rewards[ends] -= (batch.knobs["token_cost"] * batch.forest.length[ends]).clip(max=most)
        return batch._replace(forest=batch.forest.with_columns(rewards=rewards))

    return Stage("shorter", grow=grow, reads=(Knob("token_cost", least=0, doc="f32[], the cost of a token"),),
                 needs=("length", "rewards"))
'''
CONTROLLER = '''
import jax.numpy as jnp

from jaxrl_llm.control import Controller, controller


@controller
def rising_cost(*, by: float = 0.125):
    return Controller(lambda: jnp.float32(0), lambda cost: {"token_cost": cost}, lambda cost, facts: cost + by,
                      facts=("step",), knobs=("token_cost",))
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Both files, in a folder on the path; what they register is there until the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("own_stage", STAGE), ("own_controller", CONTROLLER)):
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for table, name in ((sys.modules, "own_stage"), (sys.modules, "own_controller"), (STAGES, "shorter"),
                        (CONTROLLERS, "rising_cost")):
        table.pop(name, None)


def config(**changes):
    c = tiny_config.get_config()
    c.update_from_flattened_dict({"method": "grpo", "controllers": "own_controller:rising_cost(by=0.25)",
                                  "model.num_layers": 1, **changes})
    return c


@pytest.mark.parametrize("name", ["shorter(most=0.5)", "own_stage:shorter(most=0.5)"])
def test_a_knob_of_a_stage_and_a_controller_costs_two_files(own, name):
    importlib.import_module("own_stage")
    run, params = setup.build(config(stages=name))
    state, rewards = setup.initial_state(run, params), []
    for cost in (0.0, 0.25, 0.5):
        finished = run.source.next(run.learner.publish(state))
        forest = finished.forest
        plain = forest.components[forest.ends] @ [one.weight for one in run.source.stream.partner.reward.rewards]
        lost = np.minimum(np.float32(cost) * forest.length[forest.ends], 0.5)
        np.testing.assert_allclose(forest.rewards[forest.ends], plain - lost, atol=1e-6)
        assert finished.metrics["control/token_cost"] == cost and (lost.max() > 0) == (cost > 0)
        rewards.append(finished.rollouts.rewards)
        state = run.learner.learn(state, None, facts=finished.facts).state
    assert (rewards[2] != rewards[0]).any()


def test_a_knob_that_nothing_reads_and_a_stage_that_lacks_a_fact_are_refused_before_the_first_step(own):
    with pytest.raises(ValueError, match="controller 'own_controller:rising_cost' sets 'token_cost', which no part of this "
                                         "run reads. Did you mean 'token_limits', which the stage 'sample' reads"):
        setup.build(config())
    importlib.import_module("own_stage")
    with pytest.raises(ValueError, match="Unknown stage 'shortr'. Did you mean 'shorter'"):
        setup.build(config(stages="shortr"))
    run, _ = setup.build(config(stages="shorter"))
    with pytest.raises(ValueError, match="the stage 'late' needs lenth, which neither forests of this run nor earlier stages"):
        dataclasses.replace(run.source, stages=(*run.source.stages, Stage("late", needs=("lenth", "rewards"))))
