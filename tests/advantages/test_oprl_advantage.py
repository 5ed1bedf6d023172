"""OPRL on its worked example, and steps of uneven length with ids that skip numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.data.rollouts import from_lists, pad_lists
from jaxrl_llm.maths.segments import step_totals

# Two tokens in the first step of the first trajectory, one in every other; q = beta * sum, the ids need not be dense.
DIFFERENCE = pad_lists([[[1.5, 2.5, 8.0], [2.0], [-6.0, 2.0]]])
IDS = np.array([[[0, 0, 3], [2, 9, 9], [1, 2, 9]]])
EXAMPLE = from_lists(
    [[10, 0, 0]], lengths=[[3, 1, 2]], step_ids=IDS, old_logprobs=np.zeros((1, 3, 3), np.float32),
    extras={"prm_logprobs": DIFFERENCE})


@pytest.mark.parametrize("hyper, outcome, process", [
    ({}, [1.154700, -0.577350, -0.577350], [0.392232, 1.176695, 0, -1.568927, 0]),
    ({"norm": "rloo", "group_stats": "first_step"}, [10, -5, -5], [0.749998, 1.499996, 0.374999, -1.124997, 0.374999]),
    ({"norm": "grpo", "group_stats": "first_step"}, np.array([20, -10, -10]) / 3,
     [0.499999, 0.999998, 0.249999, -0.749998, 0.249999])])
def test_worked_example(hyper, outcome, process):
    values, _ = advantages.make("oprl", **hyper).update(EXAMPLE, ())
    a, b, c = outcome
    first, second, third, fourth, fifth = process
    expected = pad_lists([[[a + first, a + first, a + second], [b + third], [c + fourth, c + fifth]]])
    np.testing.assert_allclose(values, expected, atol=2e-6)
    weighted, _ = advantages.make("oprl", alpha=0.5, **hyper).update(EXAMPLE, ())
    np.testing.assert_allclose(weighted[0, 0, 2], a + second / 2, atol=2e-6)


def test_a_lone_trajectory_has_no_baseline():
    rollouts = from_lists([[3.0]], step_ids=np.zeros((1, 1, 1), int), old_logprobs=np.zeros((1, 1, 1), np.float32),
                          extras={"prm_logprobs": np.full((1, 1, 1), 2.0, np.float32)})
    for norm in ("grpo_std", "grpo", "rloo"):
        values, _ = advantages.make("oprl", norm=norm).update(rollouts, ())
        np.testing.assert_allclose(values, 4.0, atol=2e-5)


def test_steps_against_a_loop():
    rng = np.random.default_rng(1)
    ids = np.cumsum(rng.integers(0, 3, (2, 3, 8)) == 0, axis=-1) * 2
    mask, x = rng.random((2, 3, 8)) < 0.7, rng.normal(size=(2, 3, 8))
    mask[0, 0] = False
    totals, last = step_totals(jnp.float32(x), jnp.asarray(ids), jnp.asarray(mask))
    for p, g in np.ndindex(2, 3):
        ends = []
        for name in np.unique(ids[p, g][mask[p, g]]):
            own = np.flatnonzero(mask[p, g] & (ids[p, g] == name))
            np.testing.assert_allclose(totals[p, g, own], x[p, g, own].sum(), atol=1e-6)
            ends.append(own[-1])
        assert np.flatnonzero(last[p, g]).tolist() == ends


def test_equal_steps_have_exactly_no_process_advantage():
    """Thirty steps have the same three numbers at different positions: the deviation must not amplify rounding noise."""
    x = np.tile(np.float32([0.1, -0.37, 0.013]), (1, 2, 10))
    rollouts = from_lists([[1, 1]], lengths=[[30, 30]], step_ids=np.tile(np.arange(30) // 3, (1, 2, 1)),
                          old_logprobs=np.zeros((1, 2, 30), np.float32), extras={"prm_logprobs": x})
    assert not np.any(advantages.make("oprl").update(rollouts, ())[0])
