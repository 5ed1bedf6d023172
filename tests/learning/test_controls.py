"""What controllers observe: facts of steps or of evaluations, and an error for those that never come."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, control, objectives
from jaxrl_llm.control import Controller, Known
from jaxrl_llm.data.rollouts import Role, from_lists, pad_lists
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.controls import Controls, facts_of
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.parallel import make_mesh

MESH = make_mesh()
SCORE = {"score": np.float32(0.5)}


def counting(*facts, knobs=()):
    """A controller of one's own that counts what it observes."""
    return Controller(lambda: jnp.int32(0), lambda seen: {}, lambda seen, given: seen + 1, facts=facts, knobs=knobs)


def step_facts(metrics=None, **further):
    """The facts of a step with rollouts, as a run gives them; `further` of its source."""
    rollouts = from_lists([[1, 0], [0, 0]], prompt_ids=jnp.array([3, 1]))
    counts = {"step": np.int32(0), "tried": np.int32([0, 2, 0, 2]), "right": np.int32([0, 0, 0, 1])}
    return counts | further | facts_of(rollouts, rollouts, {"w": jnp.ones(2)}, {"loss": 1.0} if metrics is None else metrics)


def counted(facts, one):
    """What the controller has counted after these observations."""
    controls = Controls({"own": one})
    states = controls.init()
    for given in facts:
        states = controls.observe(states, given, MESH)
    return int(states["own"])


@pytest.mark.parametrize(("fact", "hint"), [
    ("reward", r" Did you mean 'rewards'\? A step has .*rewards.*; an evaluation has score"),
    ("expectd", r" Did you mean 'expected'\? A step has .*expected"), ("zzz", r" A step has entropy, expected, "),
    ("entropy_now", r" Did you mean 'entropy'"),
    ("ratios", r" It is f32\[P, G, T\], probability of each token of `rollouts` after the updates of the step .* A step")])
def test_a_fact_that_never_comes_is_an_error_at_the_first_step_with_rollouts(fact, hint):
    nothing_left = {"step": np.int32(0), "tried": np.int32([0]), "right": np.int32([0])}
    assert counted([nothing_left, SCORE], counting("rewards", fact)) == 0  # here others are missing too
    with pytest.raises(ValueError, match=f"controller 'own' observes '{fact}', which no step of this run has.{hint}"):
        counted([nothing_left, step_facts(expected=np.float32([1, 2]))], counting("rewards", fact))


def test_facts_of_the_source_are_observed_and_some_are_missing_in_some_steps():
    rates = {"reference_rates": np.float32([1])}
    assert counted([step_facts(expected=np.float32([1, 2]))] * 2, counting("rewards", "expected")) == 2
    assert counted([step_facts(**rates), {"step": np.int32(1), **rates}], counting("reference_rates")) == 2
    assert counted([step_facts(metrics={}), step_facts()], counting("metrics")) == 1


def test_the_entropy_of_a_step_is_that_of_what_the_policy_drew():
    """Nobody drew the expert's token, whose entropy is 0."""
    rollouts = from_lists([[1, 0]], [[2, 1]], entropies=pad_lists([[[0, 3], [1]]]),
                          role=jnp.array([[[Role.EXPERT, Role.POLICY], [Role.POLICY, Role.PADDING]]]))
    assert facts_of(rollouts, rollouts, {}, {})["entropy"] == 2


def test_steps_and_evaluations_have_controllers_of_their_own():
    with pytest.raises(ValueError, match="controller 'own' observes score, which comes with evaluations, and rewards, step, "):
        Controls({"own": counting("step", "score", "rewards")})
    with pytest.raises(ValueError, match="'own' observes score, .* and reward, .*make two controllers of it"):
        Controls({"own": counting("reward", "score")})
    assert counted([step_facts(), SCORE, step_facts()], counting("score")) == 1


def test_a_controller_that_reads_nothing_observes_steps_alone():
    assert counted([SCORE, step_facts(), SCORE, {"step": np.int32(1)}, SCORE], counting()) == 2


def test_what_was_measured_is_observed_in_a_step_without_rollouts():
    """Problems that were measured beside a batch of which nothing is left: they were paid for, and predictions follow them."""
    predictor = control.make("dots_rr", reference=4, width=8)
    controls = Controls({"dots_rr": predictor, "own": counting("rewards", "reference_rates")})
    learner = Learner(None, None, (), None, MESH, (1,), 1, controls=controls)
    optimizer, _ = optimizers.make_optimizer(1e-3, 1)
    embeddings = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)
    state = state_lib.create({"w": jnp.ones(1)}, None, optimizer, advantages.make("grpo"), objectives.make("ppo_clip"),
                             jax.random.key(0))
    seed = jax.random.key_data(jax.random.key(1))
    known = (Known("embeddings", "", lambda: embeddings), Known("seed", "", lambda: seed))
    state = state.replace(control=controls.init(known))
    tried = np.zeros(9, np.int32)
    rates = {"reference_rates": np.float32([1, 0, 1, 0.5]), "tried": tried, "right": tried}
    assert (np.asarray(state.control["dots_rr"].predicted) == 0.5).all()
    learned = learner.learn(state, None, facts=rates)
    seen = learned.state.control
    assert np.ptp(seen["dots_rr"].predicted) > 0.01 and int(seen["dots_rr"].step) == 1 and int(seen["own"]) == 0
    assert int(learned.state.step) == 1 and learned.rollouts is None
