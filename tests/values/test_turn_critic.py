"""The critic of turns against ArCHer's worked example, plain rows and numpy; its row of the catalogue by hand."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.advantages.turns import of_environment
from jaxrl_llm.data.packing import of_groups, pack
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.objectives.turns import of_turns
from jaxrl_llm.values import turn_critic
from jaxrl_llm.values.turn_critic import TurnCritic

MODEL = Transformer(ModelConfig(vocab_size=20, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8,
                                mlp_size=24))
CRITIC = TurnCritic(MODEL, optax.adam(1e-2), jax.random.key(5), epochs=20)
READ, NONE = -1, 9
STEPS = np.array([[[0, 0, READ, 1, 1, 1], [0, READ, 1, READ, 2, NONE]], [[0, 0, 0, NONE, NONE, NONE], [NONE] * 6]])


def four(*values):
    """Values of the spec's two turns, twins last, as `[1, 2, 1, 2]`: two trajectories of one turn."""
    return jnp.array(values).reshape(1, 2, 1, 2)


@functools.cache
def batch():
    """Trajectories of two, three, one and no turns, with answers that are read between them."""
    random = np.random.default_rng(3)
    mask = (STEPS >= 0) & (STEPS < 9)
    step = np.full((2, 2, 3), -1)
    step[0, 0, :2], step[0, 1], step[1, 0, 0] = [0, 1], [0, 1, 2], 0
    return jax.tree.map(jnp.asarray, Rollouts(
        mask=mask, valid=mask.any(-1), tokens=random.integers(0, 20, STEPS.shape).astype(np.int32), step_ids=STEPS % 9,
        prompt_tokens=random.integers(0, 20, (2, 3)).astype(np.int32), prompt_mask=np.array([[False, True, True], [True] * 3]),
        rewards=np.zeros((2, 2), np.float32),
        extras={"step": step, "step_rewards": np.array([[[0, 1, 0], [0, 0, 1]], [[0.5, 0, 0], [0, 0, 0]]], np.float32)}))


def params():
    result = MODEL.init(jax.random.key(0))
    return result | {"layers": jax.tree.map(lambda x: x * 6 if x.ndim == 3 else x, result["layers"])}


def test_worked_example_of_the_critic():
    q, v, slow_q, next_v = four(.5, .4, .2, .3), four(.3, .35, .1, .2), four(.6, .5, .25, .3), four(.7, .6, .9, .8)
    rewards, done = jnp.array([[[0.0], [1.0]]]), jnp.array([[[False], [True]]])
    y, u = turn_critic.targets(rewards, done, next_v, slow_q, 0.95)
    np.testing.assert_allclose(y.ravel(), [.665, .57, 1, 1], atol=1e-6)
    np.testing.assert_allclose(turn_critic.losses(q, v, y, u, jnp.ones((1, 2, 1), bool)), [.593062, .0725], atol=1e-6)


def spoken(**extras):
    """Two trajectories of one turn, of two tokens and one, with advantages of 0.2 and -0.05."""
    mask = jnp.array([[[True, True], [True, False]]])
    return Rollouts(mask=mask, valid=jnp.ones((1, 2), bool), rewards=jnp.zeros((1, 2)), step_ids=jnp.zeros((1, 2, 2), int),
                    extras={"turn_q": jnp.array([[[.6, .5], [.1, .2]]])[:, :, None],
                            "turn_v": jnp.array([[[.3, .35], [.15, .2]]])[:, :, None],
                            "step": jnp.zeros((1, 2, 1), int), "step_rewards": jnp.zeros((1, 2, 1)), **extras})


def test_worked_example_of_the_policy():
    rollouts = spoken()
    result, _ = of_environment(advantages.make("archer")).update(rollouts, ())
    np.testing.assert_allclose(result, [[[.2, .2], [-.05, 0]]], atol=1e-6)
    logprobs = jnp.array([[[-1, -.5], [-.2, 0]]])
    objective = of_turns(objectives.make("reinforce", aggregation="seq_mean_token_sum"))
    (loss, _), gradient = jax.value_and_grad(objective.update, has_aux=True)(logprobs, rollouts, result, objective.init())
    np.testing.assert_allclose(loss, .145, atol=1e-6)
    np.testing.assert_allclose(gradient, [[[-.1, -.1], [.025, 0]]], atol=1e-6)


def test_worked_example_of_the_baseline_of_tokens():
    rollouts = spoken(values=jnp.array([[[.1, .2], [0, .5]]]))
    estimator = of_environment(advantages.make("archer", baseline=True))
    result, _ = estimator.update(rollouts, ())
    np.testing.assert_allclose(result, [[[.1, 0], [-.05, 0]]], atol=1e-6)
    apart = jnp.where(rollouts.mask, estimator.value_targets(rollouts, False) - rollouts.extras["values"], 0)
    np.testing.assert_allclose(jnp.mean(apart**2), .003125, atol=1e-7)
    objective = of_turns(objectives.make("reinforce", aggregation="seq_mean_token_sum"))
    loss, _ = objective.update(jnp.array([[[-1, -.5], [-.2, 0]]]), rollouts, result, objective.init())
    np.testing.assert_allclose(loss, .045, atol=1e-6)



def test_places_are_the_first_token_of_a_turn_and_the_slot_behind_it():
    places = turn_critic.turn_places(batch())
    assert places.tolist() == [[[[0, 2], [3, 6], [0, 0]], [[0, 1], [2, 3], [4, 5]]], [[[0, 3], [0, 0], [0, 0]], [[0, 0]] * 3]]


@pytest.mark.slow
def test_states_are_those_of_plain_rows():
    r, weights = batch(), params()
    result = jax.jit(CRITIC.states)(weights, None, r)
    for p, g, k in ((0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 0, 0)):
        own = np.flatnonzero(np.asarray(r.mask[p, g] & (r.step_ids[p, g] == k)))
        prompt = r.prompt_tokens[p][r.prompt_mask[p]]
        for side, count in enumerate((own[0], own[-1] + 1)):
            row = jnp.concatenate([prompt, r.tokens[p, g, :count], jnp.zeros(1, int)])  # the state before the last slot
            alone, _ = MODEL.packed_states(weights, row[None, :1], jnp.ones((1, 1), bool), row[None, None, 1:])
            np.testing.assert_allclose(result[p, g, k, side], alone[0, 0, -1], atol=2e-5)
    assert not result[1, 1].any() and not result[0, 0, 2].any()
    packed, states = pack(*of_groups(r.prompt_tokens, r.prompt_mask, np.asarray(r.tokens), r.mask), np.asarray(r.mask), [9]), \
        CRITIC.no_states(r)
    count, length = packed.node.shape
    assert count > 1
    add = jax.jit(CRITIC.with_packed)
    for row in range(count):
        rows = jax.tree.map(lambda x: jnp.asarray(x[row:row + 1]), packed.rows)
        states = add(states, weights, None, r, rows, packed.index, row * length)
    np.testing.assert_allclose(states, result, atol=2e-5)


def test_slow_copies_follow_by_tau():
    state = CRITIC.init(None)
    zeros, ones = jax.tree.map(jnp.zeros_like, state.params), jax.tree.map(jnp.ones_like, state.params)
    still = TurnCritic(MODEL, optax.sgd(0.0), jax.random.key(5), epochs=1)
    states = jax.random.normal(jax.random.key(1), (2, 2, 3, 2, 16))
    state = turn_critic.TurnCriticState(ones, zeros, optax.sgd(0.0).init(ones))
    moved, _ = still.fit(state, batch().replace(extras={**batch().extras, "turn_states": states}))
    for leaf in jax.tree.leaves(moved.slow):
        np.testing.assert_allclose(leaf, 0.1, rtol=1e-6)


def fitted(rollouts, times):
    state, result = CRITIC.init(None), []
    fit = jax.jit(CRITIC.fit)
    for _ in range(times):
        state, facts = fit(state, rollouts)
        result.append(facts)
    return state, result


@pytest.mark.slow
def test_values_become_the_returns_that_were_seen():
    r = batch()
    r = r.replace(extras={**r.extras, "turn_states": jax.jit(CRITIC.states)(params(), None, r)})
    state, result = fitted(r, 60)
    q, v = turn_critic.values(state.params, r.extras["turn_states"])
    there = np.asarray(turn_critic.turns_of(r))
    wanted = np.array([[[.95, 1, 0], [.95 ** 2, .95, 1]], [[.5, 0, 0], [0, 0, 0]]])
    np.testing.assert_allclose(turn_critic.returns_of(r.extras["step_rewards"], jnp.asarray(there), 0.95), wanted, atol=1e-6)
    np.testing.assert_allclose(np.asarray(q)[there], np.stack([wanted] * 2, -1)[there], atol=0.03)
    # trajectories of one prompt share the state before their first turn, whose value is the mean of their first Q
    np.testing.assert_allclose(v[0, 0, 0], np.mean([q[0, 0, 0], q[0, 1, 0]], axis=0), atol=0.05)
    assert result[-1]["value/q_loss"] < 0.1 * result[0]["value/q_loss"] and result[-1]["value/explained_variance"] > 0.9
    assert all(facts["value/skipped"] == 0 for facts in result)


def test_what_is_no_turn_changes_nothing():
    r = batch()
    states = jax.random.normal(jax.random.key(2), (2, 2, 3, 2, 16))
    clean = r.replace(extras={**r.extras, "turn_states": states})
    there = turn_critic.turns_of(r)
    dirty = r.replace(extras={**r.extras, "turn_states": jnp.where(there[..., None, None], states, 7.0),
                              "step_rewards": jnp.where(there, r.extras["step_rewards"], 5.0)})
    one, other = fitted(clean, 1), fitted(dirty, 1)
    for a, b in zip(jax.tree.leaves(one[0].params), jax.tree.leaves(other[0].params)):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("hyper", [{"gamma": 1.5}, {"tau": 0.0}, {"critic_epochs": 0}])
def test_numbers_out_of_range_are_refused(hyper):
    with pytest.raises(ValueError, match=f"{[*hyper][0]}="):
        advantages.make("archer", **hyper)
