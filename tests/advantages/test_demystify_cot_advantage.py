"""Cosine reward and repetition: literal values, and repeated windows against a plain Python set of tuples."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages
from jaxrl_llm.advantages.demystify_cot import cosine_reward, repetition
from jaxrl_llm.data.rollouts import from_lists


def test_cosine_reward():
    lengths = jnp.array([1, 250, 500, 900, 984])
    right = cosine_reward(jnp.ones(5, bool), lengths, max_len=1000)
    np.testing.assert_allclose(right, [1.999998, 1.853553, 1.5, 1.024472, -10], rtol=1e-6)
    wrong = cosine_reward(jnp.zeros(5, bool), lengths, max_len=1000)
    np.testing.assert_allclose(wrong, [-9.999975, -8.535534, -5, -0.244717, -10], rtol=2e-6)
    assert cosine_reward(jnp.array(True), jnp.array(983), max_len=1000) > 1
    preset = cosine_reward(jnp.array([True, False]), jnp.array(500), max_len=1000, correct=(0, 10), wrong=(0, 0))
    np.testing.assert_allclose(preset, [5, 0], atol=1e-6)


def penalised(tokens, mask, size, only_start):
    """Tokens of repeated windows, one window after the other."""
    seen, hit, end = set(), np.zeros(len(tokens), bool), -1
    for start in range(len(tokens) - size + 1):
        window = tuple(tokens[start : start + size])
        if not mask[start : start + size].all():
            continue
        if window in seen:
            if not only_start or start > end:
                hit[start : start + size] = True
            end = start + size
        seen.add(window)
    return hit


def test_repetition_example():
    tokens, mask = jnp.array([[[1, 2, 3, 9, 1, 2, 3, 1, 2, 3]]]), jnp.ones((1, 1, 10), bool)
    assert np.flatnonzero(repetition(tokens, mask, size=3)).tolist() == [4, 5, 6, 7, 8, 9]
    assert np.flatnonzero(repetition(tokens, mask, size=3, only_start=True)).tolist() == [4, 5, 6]
    assert not np.any(repetition(tokens, mask, size=11))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_repetition_against_a_set_of_tuples(size):
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, 2, (3, 2, 24))
    tokens[0, 0, 12:] = tokens[0, 0, :12]
    tokens[0, 1] = 7
    mask = rng.random((3, 2, 24)) < 0.95
    mask[0] = True
    mask[2, 1] = False
    for only_start in (False, True):
        actual = repetition(jnp.asarray(tokens), jnp.asarray(mask), size=size, only_start=only_start)
        for p, g in np.ndindex(3, 2):
            expected = penalised(tokens[p, g], mask[p, g], size, only_start)
            np.testing.assert_array_equal(actual[p, g], expected, err_msg=str((p, g, only_start)))


def example(**fields):
    return from_lists([[1]], lengths=[[6]], tokens=np.array([[[1, 2, 3, 1, 2, 3]]]),
                      old_logprobs=np.zeros((1, 1, 6), np.float32), ref_logprobs=np.zeros((1, 1, 6), np.float32),
                      extras={"values": np.zeros((1, 1, 6), np.float32)}).replace(**fields)


def test_returns_of_two_channels():
    expected = [1.855817, 1.854361, 1.852891, 1.851406, 1.900411, 1.949911]
    estimator = advantages.make("demystify_cot", max_len=1000, ngram=3)
    np.testing.assert_allclose(estimator.update(example(), ())[0][0, 0], expected, atol=1e-6)
    values = np.arange(6, dtype=np.float32).reshape(1, 1, 6)
    lower, _ = estimator.update(example(extras={"values": jnp.asarray(values)}), ())
    np.testing.assert_allclose(lower[0, 0], np.array(expected) - np.arange(6), atol=1e-6)


def test_kl_is_split_between_the_channels():
    kl = np.array([0.3, -0.2, 0.5, 0.1, 0.4, -0.6])
    estimator = advantages.make("demystify_cot", max_len=1000, ngram=3, kl_coef=0.1, penalty=0.0)
    values, _ = estimator.update(example(old_logprobs=jnp.float32(kl)[None, None]), ())
    outcome = 1.5 + 0.5 * np.cos(np.pi * 6 / 1000)
    expected = [outcome - sum(0.05 * kl[j] * (1 + 0.99 ** (j - t)) for j in range(t, 6)) for t in range(6)]
    np.testing.assert_allclose(values[0, 0], expected, atol=1e-6)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="ngram=0"):
        advantages.make("demystify_cot", ngram=0)
