"""Sampled frequencies, kept sets, log-probs and entropies against float64 numpy."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxrl_llm.engines.sampling import Sampling, check, draw, inverse_cdf, restrict

LOGITS = np.array([2.0, -1.0, 0.5, 0.5, -3.0, 1.5, 0.0, -0.5], np.float32)


def expected(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The distribution in float64, by the definitions: temper, then top-k, then top-p of what is left, then min-p."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    if top_k is not None:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if top_p is not None:
        order, kept, mass = np.argsort(-p, kind="stable"), set(), 0.0
        for i in order:
            if mass >= top_p:
                break
            kept.add(p[i])
            mass += p[i]
        p = np.where(np.isin(p, list(kept)), p, 0)
        p /= p.sum()
    if min_p is not None:
        p = np.where(p >= min_p * p.max(), p, 0)
        p /= p.sum()
    return p


@functools.lru_cache
def drawer():
    return jax.jit(draw)


def many(logits, sampling, count=20_000, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.device_get(drawer()(keys, jnp.broadcast_to(logits, (count, len(logits))), sampling))


def entropy(p):
    return -(p[p > 0] * np.log(p[p > 0])).sum()


CASES = [dict(temperature=t) for t in (0.3, 0.7, 1.0, 2.5)] + [
    dict(temperature=1.3, top_k=3), dict(temperature=1.0, top_p=0.8), dict(temperature=0.8, min_p=0.2),
    dict(temperature=1.5, top_k=5, top_p=0.9, min_p=0.15)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_logprobs_and_entropy_are_those_of_the_kept_distribution(case):
    p = expected(LOGITS, **case)
    found = many(LOGITS, Sampling(**case))
    counts = np.bincount(found.token, minlength=len(p))
    assert counts[p == 0].sum() == 0
    if (p > 0).sum() > 1:
        assert stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3
    np.testing.assert_allclose(found.logprob, np.log(p[found.token]), atol=2e-6)
    np.testing.assert_allclose(found.entropy, entropy(p), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", (1, 2, 255, 256, 257, 700))
def test_any_vocabulary_size_is_drawn_in_proportion(vocab):
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    p = expected(logits)
    found = many(logits, Sampling(), count=40_000)
    assert found.token.min() >= 0 and found.token.max() < vocab
    frequent = p * 40_000 > 5  # the chi-square test wants enough expected draws in every class
    counts = np.bincount(found.token, minlength=vocab)
    seen, wanted = counts[frequent], p[frequent] * 40_000
    rest = counts[~frequent].sum(), p[~frequent].sum() * 40_000
    if rest[1] > 5:
        seen, wanted = np.append(seen, rest[0]), np.append(wanted, rest[1])
    if len(seen) > 1:
        assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3
    np.testing.assert_allclose(found.logprob, np.log(p[found.token]), atol=5e-6)


def support(logits, **options):
    return np.flatnonzero(np.isfinite(np.asarray(restrict(jnp.asarray([logits]), Sampling(**options)))[0])).tolist()


def test_supports_are_exact():
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probs).astype(np.float32)
    assert support(logits, top_k=1) == [0]
    assert support(logits, top_k=3) == [0, 1, 2]
    assert support(logits, top_k=99) == [0, 1, 2, 3]
    assert support(logits, top_p=0.39) == [0]
    assert support(logits, top_p=0.41) == [0, 1]  # the token that crosses the threshold belongs to the set
    assert support(logits, top_p=0.69) == [0, 1]
    assert support(logits, top_p=0.95) == [0, 1, 2, 3]
    assert support(logits, min_p=0.49) == [0, 1, 2]  # 0.2 >= 0.49 * 0.4
    assert support(logits, min_p=0.51) == [0, 1]
    assert support(logits, min_p=0.0) == [0, 1, 2, 3]
    # After top-k the mass is renormalised: 0.4 / 0.7 = 0.57 alone reaches 0.5.
    assert support(logits, top_k=2, top_p=0.5) == [0]
    # Temperature comes first: at 2 the probabilities are 0.325, 0.282, 0.230, 0.163.
    assert support(logits, temperature=2.0, top_p=0.6) == [0, 1]
    assert support(logits, temperature=2.0, top_p=0.62) == [0, 1, 2]


def test_ties_with_the_last_kept_token_are_kept():
    assert support(np.array([1.0, 3.0, 1.0, 0.0], np.float32), top_k=2) == [0, 1, 2]
    assert support(np.array([0.0, 0.0, 0.0, 0.0], np.float32), top_p=0.25) == [0, 1, 2, 3]


def test_greedy_takes_the_most_likely_token_and_the_first_of_equals():
    rows = np.array([[0.0, 4.0, 1.0], [2.0, 0.0, 2.0]], np.float32)
    found = drawer()(jax.random.split(jax.random.key(0), 2), rows, Sampling(np.float32(0.0)))
    assert found.token.tolist() == [1, 0]


@pytest.mark.slow
def test_impossible_tokens_are_never_drawn():
    logits = np.full(600, -np.inf, np.float32)
    logits[[3, 255, 256, 511]] = 0.0
    found = many(logits, Sampling(), count=50_000)
    counts = np.bincount(found.token, minlength=600)
    assert set(np.flatnonzero(counts)) == {3, 255, 256, 511}
    assert stats.chisquare(counts[[3, 255, 256, 511]]).pvalue > 1e-3
    np.testing.assert_allclose(found.entropy, np.log(4), atol=1e-6)
    assert np.isfinite(found.logprob).all()


def test_inverse_cdf_at_its_edges():
    weights = np.array([[0.0, 0.25, 0.0, 0.75, 0.0]], np.float32)
    def place(u):
        return int(inverse_cdf(weights, np.float32([u]))[0])
    assert [place(u) for u in (0.0, 0.2499, 0.25, 0.99999994, 1.0)] == [1, 1, 3, 3, 3]


def test_a_row_depends_on_its_own_key_alone():
    keys = jax.random.split(jax.random.key(3), 6)
    logits = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)
    together = drawer()(keys, logits, Sampling(0.9)).token
    backwards = drawer()(keys[::-1], logits[::-1], Sampling(0.9)).token
    alone = [int(drawer()(keys[i:i + 1], logits[i:i + 1], Sampling(0.9)).token[0]) for i in range(6)]
    assert together.tolist() == backwards[::-1].tolist() == alone


def test_changing_a_value_does_not_compile_again():
    compiled = jax.jit(lambda *arguments: draw(*arguments))
    keys, logits = jax.random.split(jax.random.key(0), 2), np.zeros((2, 8), np.float32)
    for temperature, top_k, top_p in ((1.0, 3, 0.9), (0.5, 4, 0.7), (0.0, 1, 0.1)):
        compiled(keys, logits, Sampling(temperature, top_k, top_p))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize("sampling, words", (
    (Sampling(-0.1), "temperature=-0.1"), (Sampling(float("nan")), "temperature=nan"), (Sampling(1.0, top_k=0), "top_k=0"),
    (Sampling(1.0, top_k=2**31), r"top_k=2147483648: must be from 1 to 2\^31 - 1"),
    (Sampling(1.0, top_p=0.0), "top_p=0.0"), (Sampling(1.0, top_p=1.5), "top_p=1.5"), (Sampling(1.0, min_p=1.0), "min_p=1.0")))
def test_impossible_values_are_refused(sampling, words):
    with pytest.raises(ValueError, match=words):
        check(sampling)


def test_sensible_values_pass():
    for sampling in (Sampling(), Sampling(0.0), Sampling(0.7, 50, 0.95, 0.05), Sampling(top_k=2**31 - 1),
                     Sampling(top_p=1.0, min_p=0.0)):
        check(sampling)


def test_rows_of_one_call_have_distributions_of_their_own():
    """Arrays `[N]` draw in each row what a call with that row's numbers draws; numbers that are off change nothing."""
    rows = [Sampling(0.0, 8, 1.0, 0.0), Sampling(0.7, 3, 1.0, 0.0), Sampling(1.5, 8, 0.6, 0.0), Sampling(1.0, 8, 1.0, 0.2)]
    keys = jax.random.split(jax.random.key(3), len(rows))
    logits = jnp.broadcast_to(LOGITS, (len(rows), len(LOGITS)))
    columns = Sampling(*(np.asarray(column) for column in zip(*((s.temperature, s.top_k, s.top_p, s.min_p) for s in rows))))
    found = drawer()(keys, logits, columns)
    for i, sampling in enumerate(rows):
        alone = drawer()(keys[i:i + 1], logits[i:i + 1], sampling)
        for got, expected in zip(found, alone):
            np.testing.assert_allclose(got[i], expected[0], atol=1e-6)
