"""Schedules count the updates that a run plans: one without a gradient, or left out, does not delay the decay."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streams import EOS

from jaxrl_llm import advantages, objectives, recorders
from jaxrl_llm.control import Controller
from jaxrl_llm.data import rollouts, shapes
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.controls import Controls
from jaxrl_llm.learning.layouts import Layout
from jaxrl_llm.learning.learner import Learner
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.maths.descent import descend
from jaxrl_llm.objectives.scheduled import Counted, scheduled
from jaxrl_llm.parallel import make_mesh
from jaxrl_llm.runs import rates
from jaxrl_llm.setup import parts, setup, start
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.setup.learners import make_learner, optimizer_of
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.values.critic import CriticState


def counts(tree):
    return [int(count) for _, count in optax.tree.get_all_with_path(tree, "count")]


def learner_of(steps_alone=0, **further):
    """A learner with three minibatches in each of two epochs, and a state with a critic beside the policy."""
    beside = recorders.Recorder("critic", ("values",), lambda *_: {}, init=dict, fit=lambda *_: None, updates=5)
    optimizer, _ = optimizers.make_optimizer(1e-3, 12, schedule="linear")
    objective = scheduled(lambda clip_low: objectives.ppo_clip(clip_low=clip_low), {"clip_low": lambda step: step}, 6)
    layout = Layout(None, None, None, objective, optimizer, (), ())
    learner = Learner(None, None, (beside,), layout, make_mesh(), (1,), 1, epochs=2, minibatches=3, pretrain_steps=steps_alone,
                      **further)
    weights = {"w": jnp.ones(1)}
    state = state_lib.create(weights, None, optimizer, advantages.make("grpo"), objective, jax.random.key(0))
    return learner, state.replace(beside={"critic": CriticState(weights, optimizer.init(weights))})


def test_a_step_without_rollouts_is_planned_all_the_same():
    """Six updates of the policy, and thirty of a critic whose fits have five; Adam's own count is of updates made: none."""
    learner, state = learner_of()
    for number in (1, 2):
        state = learner.learn(state, None).state
        assert counts(state.opt_state) == [0, 6 * number] and counts(state.beside["critic"].opt_state) == [0, 30 * number]
        assert isinstance(state.objective_state, Counted) and int(state.objective_state.updates) == 6 * number


def test_steps_of_a_critic_alone_are_none_of_the_policys():
    learner, state = learner_of(steps_alone=1)
    seen = []
    for _ in range(2):
        state = learner.learn(state, None).state
        seen.append((counts(state.opt_state)[1], counts(state.beside["critic"].opt_state)[1]))
    assert seen == [(0, 30), (6, 60)]


def test_after_a_reset_the_schedule_counts_from_there():
    resets = Controller(lambda: jnp.int32(0), lambda seen: {"reset": True}, lambda seen, facts: seen, facts=("score",),
                        knobs=("reset",))
    learner, state = learner_of(controls=Controls({"own": resets}))
    state = state.replace(control=learner.controls.init())
    state = learner.learn(learner.learn(state, None).state, None).state
    assert counts(state.opt_state) == [0, 12]
    state, reset = learner.evaluated(state, 0.5)
    assert reset and counts(learner.learn(state, None).state.opt_state) == [0, 6]


@pytest.mark.parametrize("name", optimizers.TABLE)
def test_every_schedule_of_an_optimiser_is_set_and_nothing_else(name):
    settings = {"weight_decay": 0.1} if "weight_decay" in optimizers.TABLE[name].own else {}
    optimizer, _ = optimizers.make_optimizer(1.0, 10, name=name, schedule="linear", **settings)
    params = {"matrix": jnp.ones((1, 4, 4)), "vector": jnp.ones(3)}
    state = optimizer.init(params)
    late = optimizers.at_update(state, 9)  # 1/10 of the rate
    changed = [path for (path, a), (_, b) in zip(*map(jax.tree.leaves_with_path, (state, late)), strict=True) if (a != b).any()]
    assert changed and all("count" in str(path) for path in changed)
    first, last = (optimizer.update(params, one, params)[0] for one in (state, late))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a / 10, rtol=1e-5), first, last)


def test_a_schedule_within_injected_hyperparameters_is_set():
    optimizer = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 10))
    gradient = {"w": jnp.ones(2)}
    change, _ = optimizer.update(gradient, optimizers.at_update(optimizer.init(gradient), 9))
    np.testing.assert_allclose(change["w"], [-0.1, -0.1], rtol=1e-5)


@pytest.mark.slow
def test_linear_decays_though_half_of_the_updates_have_no_gradient():
    """Two steps of two updates at 1, 3/4, 1/2 and 1/4 of the rate; of each step one prompt has equal rewards."""
    c = default_config()
    c.model.hidden_size, c.model.num_layers, c.prompts.per_step, c.sampling.group, c.sampling.max_tokens = 32, 1, 2, 2, 4
    c.optimizer.update(name="sgd", learning_rate=1e-2, warmup_updates=0, schedule="linear", clip_norm=0.0)
    c.steps, c.learner.minibatches = 2, 2
    c = resolve(c, {})
    _, model, weights = start.open_model(c.model)
    policy = Policy(model, mesh=make_mesh())
    learner, _ = make_learner(c, parts.make_parts(c, 32), policy, shapes.padded(3, 4, 2, 1))
    tokens = np.array([[[*b"12", EOS, 0], [*b"1", EOS, 0, 0]], [[*b"9999"], [*b"10", EOS, 0]]], np.int32)
    batch = rollouts.Rollouts(
        mask=tokens > 0, valid=np.ones((2, 2), bool), rewards=np.array([[1, 0], [1, 1]], np.float32), tokens=tokens,
        prompt_tokens=np.array([[*b"7+5"], [*b"9+1"]], np.int32), prompt_mask=np.ones((2, 3), bool))
    state, rates = learner.init(weights(policy.mesh, 0), None, jax.random.key(0)), []
    for _ in range(c.steps):
        before = jax.device_get(state.params)
        learned = learner.learn(state, batch)
        state = learned.state
        moved = optax.tree.norm(jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, before))
        rates.append(float(moved) / (2 * learned.metrics["grad_norm"]) / 1e-2)  # the mean of this norm and 0
    assert min(abs(rates[0] - wanted) for wanted in (1, 0.75)) < 1e-3
    assert min(abs(rates[1] - wanted) for wanted in (0.5, 0.25)) < 1e-3, "the second step's, whatever the first made"


@pytest.mark.parametrize("rate", (np.inf, -np.inf, np.nan))
@pytest.mark.parametrize("within", (True, False), ids=("of the optimiser", "beside it"))
def test_a_step_that_is_not_finite_is_refused(rate, within):
    """Of gradient [1, 0, 2] it would be [-inf, nan, -inf]."""
    optimizer = optax.adamw(rate if within else 1e-3)
    weights = {"w": jnp.array([1.0, 2.0, 3.0]), "larger": jnp.ones(4)}
    gradient = {"w": jnp.array([1.0, 0.0, 2.0]), "larger": jnp.ones(4)}
    state = optimizer.init(weights)
    new, kept, norm, finite = jax.jit(lambda *given: descend(optimizer, 1.0, *given))(
        gradient, jnp.float32(0.5), weights, state, None if within else jnp.float32(rate))
    assert not finite and float(norm) == 3.0
    jax.tree.map(np.testing.assert_array_equal, (new, kept), (weights, state))
    *_, finite = descend(optax.adamw(1e-3), 1.0, gradient, jnp.float32(0.5), weights, state)
    assert finite


@pytest.mark.parametrize("name", ("sgd", "adamw"))
def test_to_look_at_a_step_takes_no_copy_of_the_weights(name):
    weights = {"a": jnp.ones((256, 256)), "b": jnp.ones((128, 256)), "norm": jnp.ones(256)}
    optimizer, _ = optimizers.make_optimizer(1e-3, 10, name=name)
    program = jax.jit(lambda *given: descend(optimizer, 1.0, *given), donate_argnums=(2, 3))
    used = program.lower(weights, jnp.float32(0.5), weights, optimizer.init(weights)).compile().memory_analysis()
    assert used.temp_size_in_bytes < 256 * 128  # a byte for each entry of the smaller matrix


def rows_of(earlier=None, step=0, **changes):
    """The rows of the head of a run with one update in each step."""
    config = resolve(default_config(), {})
    config.update_from_flattened_dict({f"optimizer.{key}": value for key, value in changes.items() if key != "steps"})
    config.steps = changes.get("steps", config.steps)
    schedule = optimizer_of(config, config.optimizer.learning_rate, config.steps)[1]
    learner = Learner(None, None, (), None, make_mesh(), (1,), 1)
    return rates.rate_rows(setup.Run(config, None, None, learner, schedule, frozenset(), None), earlier, step)


def resolved(steps, schedule="linear"):
    return {"steps": steps, "learner": {"epochs": 1, "minibatches": 1},
            "optimizer": {"learning_rate": 1e-3, "warmup_updates": 0, "schedule": schedule}}


@pytest.mark.parametrize("schedule, last, now", (("linear", "0.0001", "0.00075"), ("cosine", "2.4e-05", "0.00085")))
def test_the_head_says_that_more_steps_take_the_rate_up_again(schedule, last, now):
    """Ten updates of 1e-3, then forty: linear 1/10 and 30/40; cosine (1 + cos 0.9 pi) / 2 and (1 + cos 0.25 pi) / 2."""
    given = dict(step=10, learning_rate=1e-3, warmup_updates=0, schedule=schedule)
    (name, text), = rows_of(resolved(10, schedule), steps=40, **given)
    assert name == "learning rate" and text == (f"rises from {last} to {now}: the {schedule} schedule now ends at step 40, and "
                                                "ended at 10")
    assert rows_of(resolved(10, schedule), steps=10, **given) == rows_of(None, steps=40, **given) == []
    assert rows_of(resolved(10, "constant"), **{**given, "schedule": "constant"}, steps=40) == []
    assert rows_of(resolved(40, schedule), steps=40, **given) == [], "an interrupted run goes on as it was"


def test_the_head_says_that_a_warm_up_is_longer_than_the_run():
    (_, text), = rows_of(steps=10, warmup_updates=200)
    assert text == "optimizer.warmup_updates=200 of 10 planned updates: the last has 5% of optimizer.learning_rate"
    assert rows_of(steps=10, warmup_updates=9) == []


def tree():
    return {"embed": jnp.ones((5, 4)), "layers": {"norm": {"scale": jnp.ones((2, 4))}, "q": {
        "kernel": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))}}}


@pytest.mark.parametrize("name", [name for name, kind in optimizers.TABLE.items() if "weight_decay" in kind.own])
def test_decay_without_norms_and_biases(name):
    """Of weights 1 with decay 1/2 at rate 1/10 each loses 1/20, but not norms and biases, as the groups of PyTorch."""
    changes = []
    for settings in ({}, {"weight_decay": 0.5, "decayed": "matrices"}):
        optimizer, _ = optimizers.make_optimizer(0.1, 10, name=name, **settings)
        gradient = jax.tree.map(lambda x: 0.01 * x, tree())
        changes.append(optimizer.update(gradient, optimizer.init(tree()), tree())[0])
    lost = jax.tree.map(lambda plain, decayed: np.unique(np.round(np.float64(plain - decayed), 4) + 0).tolist(), *changes)
    assert lost == {"embed": [0.05], "layers": {"norm": {"scale": [0.0]}, "q": {"kernel": [0.05], "bias": [0.0]}}}


@pytest.mark.parametrize("settings, message", (
    (dict(decayed="norms", weight_decay=0.1), "Unknown config.optimizer.decayed 'norms'"),
    (dict(decayed="matrices"), "config.optimizer.decayed='matrices' is about weight decay, and there is none"),
    (dict(decayed="matrices", weight_decay=0.1, name="optax:adamw"), "optax:adamw decides by itself what decays")))
def test_what_decays_is_refused_where_nothing_would(settings, message):
    with pytest.raises(ValueError, match=message):
        optimizers.make_optimizer(1e-3, 10, **settings)
