"""DAPO: overlong punishment, filter and shaped z-score on the recipe's own numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.control import dynamic_sampling
from jaxrl_llm.data.rollouts import from_lists
from jaxrl_llm.rewards.length import soft_overlong

ACCURACY = np.array([[1.0, 0], [1, 1], [0, 1]])
LENGTHS = [[18, 10], [5, 5], [20, 22]]


def test_penalty_at_full_scale():
    lengths = jnp.array([10, 16384, 16385, 18432, 20480, 30000])
    penalty = soft_overlong(20480, 4096)(lengths)
    np.testing.assert_allclose(penalty, [0, 0, -2.441406e-4, -0.5, -1, -1], rtol=1e-6)


def test_released_penalty_continues_beyond_the_budget():
    lengths = jnp.array([16, 18, 20, 22, 24])
    for variant, beyond in (("paper", [-2, -2]), ("code", [-3, -4])):
        penalty = soft_overlong(20, 4, 2.0, variant)(lengths)
        np.testing.assert_allclose(penalty, [0, -1, -2, *beyond])
    rollouts = from_lists([[1, 1, 0]], lengths=[[24, 16, 16]])
    for hyper, shaped in (({}, [0, 1, 0]), ({"variant": "code"}, [-1, 1, 0])):
        values, _ = advantages.make("dapo", max_len=20, cache_len=4, **hyper).update(rollouts, ())
        expected = (shaped - np.mean(shaped)) / (np.std(shaped, ddof=1) + 1e-6)
        np.testing.assert_allclose(values[0, :, 0], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="Allowed: code, paper"):
        advantages.make("dapo", variant="soft")


def test_worked_example():
    penalty = soft_overlong(20, 4)(jnp.array(LENGTHS))
    np.testing.assert_array_equal(2 * ACCURACY - 1 + np.asarray(penalty), [[0.5, -1], [1, 1], [-2, 0]])
    rollouts = from_lists((2 * ACCURACY - 1).tolist(), lengths=LENGTHS)
    values, _ = advantages.make("dapo", max_len=20, cache_len=4).update(rollouts, ())
    np.testing.assert_allclose(values[0, :, 0], [0.70710611, -0.70710611], atol=1e-7)


def test_default_cache_is_a_fifth_of_the_budget():
    rollouts = from_lists([[1, 1]], lengths=[[9, 10]])
    (given, _), (default, _) = (advantages.make("dapo", max_len=10, **kw).update(rollouts, ()) for kw in ({"cache_len": 2}, {}))
    assert np.array_equal(given, default) and values_differ(default)
    with pytest.raises(ValueError, match="cache=11, max_length=10"):
        advantages.make("dapo", max_len=10, cache_len=11)


def values_differ(values):
    return float(values[0, 0, 0]) != float(values[0, 1, 0])


def test_filter_looks_at_accuracy():
    valid = jnp.ones((3, 2), bool)
    keep = dynamic_sampling.informative(jnp.asarray(ACCURACY), valid)
    assert keep.tolist() == [True, False, True]


def test_filter_keeps_lone_rollouts_and_drops_empty_prompts():
    valid = jnp.array([[True, False], [False, False], [True, True]])
    accuracy = jnp.array([[1.0, jnp.nan], [jnp.nan, 0], [0.1, 0.1]])
    assert dynamic_sampling.informative(accuracy, valid).tolist() == [True, False, False]
