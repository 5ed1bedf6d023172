"""DOTS-RR: predictions from measured problems, the choice of problems, and the worked example of buffer and loss."""
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import control, objectives
from jaxrl_llm.control.dots_rr import attention, calibrated, calibration, fitted, predictions, selection
from jaxrl_llm.rollouts import from_lists
from jaxrl_llm.tasks.loader import drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
from test_replay_buffer import EMPTY, batch, step, uids  # noqa: E402

Q, R = np.float32([[1, 0], [0, 1]]), np.float32([[1, 0], [0, 1], [1, 1]])


def test_the_worked_example_of_predictions():
    weights = attention(Q, R)
    np.testing.assert_allclose(weights, [[0.401112, 0.197776, 0.401112], [0.197776, 0.401112, 0.401112]], atol=1e-6)
    base = weights @ np.float32([0.25, 0.75, 0.5])
    np.testing.assert_allclose(base, [0.449166, 0.550834], atol=1e-6)
    temperature, bias = calibration(jnp.float32([0.5, -0.1]))
    np.testing.assert_allclose([temperature, bias], [0.974077, -0.099668], atol=1e-6)
    result = calibrated(base, temperature, bias)
    np.testing.assert_allclose(result, [0.423325, 0.527423], atol=1e-6)
    np.testing.assert_allclose(selection(result, tau=0.1), [0.3793, 0.6207], atol=5e-5)


def test_a_calibration_finds_the_temperature_and_bias_that_made_its_data():
    """It keeps 1 and 0 if there are no data, or if success does not depend on the prediction."""
    base = jnp.linspace(0.05, 0.95, 200)
    temperature, bias = fitted(base, calibrated(base, jnp.float32(0.5), jnp.float32(-0.4)))
    np.testing.assert_allclose([temperature, bias], [0.5, -0.4], atol=0.03)
    assert [float(x) for x in fitted(jnp.zeros(0), jnp.zeros(0))] == [1.0, 0.0]
    against = fitted(base, 1 - base)
    assert [float(x) for x in against] == [1.0, 0.0]


@pytest.mark.slow
def test_predictions_rank_problems_by_those_that_were_measured():
    """Two clusters of problems, one solved and one unsolved; a cluster between them is preferred."""
    rng = np.random.default_rng(0)
    centre = np.repeat(np.float32([[3, 0, 0], [-3, 0, 0], [0, 0, 0]]), 20, axis=0)
    x = centre + rng.normal(0, 0.3, (60, 3)).astype(np.float32)
    ids = np.concatenate([np.arange(8), 20 + np.arange(8)])
    result = np.asarray(predictions(x, ids, np.float32([0.9] * 8 + [0.1] * 8)))
    assert result[:20].min() > result[40:].max() and result[20:40].max() < result[40:].min()
    chosen = drawn(np.array([1, 2]), 10, np.asarray(selection(result, tau=0.02)))
    assert len({*chosen.tolist()}) == 10 and (chosen >= 40).mean() > 0.7
    np.testing.assert_allclose(predictions(x, np.full(4, -1), np.zeros(4)), 0.5)


@pytest.mark.parametrize("tau", (1e-3, 0.1, 10.0))
def test_probabilities_sum_to_one_and_none_vanishes(tau):
    """At any distance from the target a problem has a weight that the loader can draw; equal predictions have equal weights."""
    predicted = np.float32([0.0, 0.3, 0.5, 0.5, 1.0, 0.5001])
    result = np.asarray(selection(predicted, tau=tau))
    assert result.sum() == pytest.approx(1) and result.min() > 0 and result[2] == result[3] == result.max()
    np.testing.assert_allclose(selection(np.full(7, 0.2, np.float32), tau=tau), 1 / 7, rtol=1e-6)
    assert sorted(drawn(np.array([3]), 6, result).tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_controller_measures_in_every_second_step_and_keeps_its_last_measurement():
    made = control.make("dots_rr", reference=3, every=2)
    x = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
    state = made.init(x, jax.random.key_data(jax.random.key(0)))
    asked, observe = [], jax.jit(made.observe)
    for number in range(4):
        proposed = made.propose(state)
        asked.append(np.asarray(proposed["reference_ids"]))
        rates = np.where(asked[-1] >= 0, [0.0, np.nan, 1.0], np.nan).astype(np.float32)
        if number:
            assert np.asarray(state.ids).tolist() == [asked[(number - 1) // 2 * 2][0], -1, asked[(number - 1) // 2 * 2][2]]
        state = observe(state, {"reference_rates": rates})
    assert [(one >= 0).all() for one in asked] == [True, False, True, False] and (asked[1] == -1).all()
    assert len({*asked[0].tolist()}) == 3 and asked[0].tolist() != asked[2].tolist()
    np.testing.assert_allclose(made.propose(made.init(x, np.zeros(2, np.uint32)))["prompt_weights"], 0.1, rtol=1e-6)
    with pytest.raises(ValueError, match="reference=1 problems every=2 steps"):
        control.make("dots_rr", reference=1)


def test_the_worked_example_of_the_buffer():
    """Problems 1 and 2 are stored; 2 returns, 3 is solved by all, 4 is new: 1, the new 2 and 4 stay."""
    from jaxrl_llm import replay
    rule = replay.make("dots_rr")
    first = step(rule, EMPTY, batch([1, 2], [[1, 0, 1, 0], [1, 0, 0, 0]], version=0), 0)
    assert uids(first.buffer) == [(1, [0, 1, 2, 3]), (2, [4, 5, 6, 7])]
    fresh = batch([2, 3, 4], [[1, 1, 0, 0], [1] * 4, [1, 1, 1, 0]], version=1, first_uid=8)
    second = step(rule, first.buffer, fresh, 1, prompts=1)
    assert uids(second.buffer) == [(1, [0, 1, 2, 3]), (2, [8, 9, 10, 11]), (4, [16, 17, 18, 19])]


@pytest.mark.parametrize("fresh, sampled", [(0.5, 4), (0.3, 3), (1.0, 8), (0.0, 1)])
def test_a_share_of_the_batch_is_replayed(fresh, sampled):
    """Eight prompts: at least one is always sampled, and the buffer may have too few."""
    from jaxrl_llm import replay
    from jaxrl_llm.replay import buffer as buffers
    rule = replay.make("dots_rr", fresh=fresh)
    buffer = step(rule, EMPTY, batch(range(9), [[1, 0]] * 9, version=0), 0).buffer
    stored, left = buffers.take(rule, buffer, 1, 8, np.random.default_rng(0))
    assert 8 - len(stored.problems) == sampled and len(left.problems) == 9
    with pytest.raises(ValueError, match="fresh=1.5"):
        replay.make("dots_rr", fresh=1.5)


def test_the_worked_example_of_the_loss():
    """Two one-token rollouts; the second ratio, 2.0, is above 1.6 * 1.2."""
    rollouts = from_lists([[1.0, 1.0]], behavior_logprobs=np.log(np.float32([[[0.4], [0.25]]])),
                          old_logprobs=np.log(np.float32([[[0.4], [0.4]]])))
    made, new = objectives.make("dots_rr"), np.log(np.float32([[[0.45], [0.5]]]))

    def loss(logprobs):
        return made.update(logprobs, rollouts, np.ones((1, 2, 1), np.float32), made.init())[0]

    value, gradient = jax.value_and_grad(loss)(new)
    np.testing.assert_allclose(value, -1.5225, atol=1e-6)
    np.testing.assert_allclose(gradient[0, :, 0], [-0.5625, 0], atol=1e-6)
