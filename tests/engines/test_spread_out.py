"""Draws that make up for what their group has drawn: the worked example of PROPS, sampling errors, bounds, and the sampler."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampler import MODEL, SEED, G, P, T, params, prompts, reference

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.sampling import RAREST, draw, spread_out

PI = np.float32([0.5, 0.3, 0.2])


def sampling_error(counts, probs):
    """KL(empirical || policy) in nats, the mean over N states weighted by visits, from `counts` and `probs` [N, V]."""
    share = counts / counts.sum(-1, keepdims=True)
    return (counts * np.log(np.where(counts > 0, share / probs, 1))).sum() / counts.sum()


def test_sampling_error_of_the_worked_example():
    np.testing.assert_allclose(sampling_error(np.array([[4, 0, 1]]), PI[None]), 0.376003, atol=1e-6)


def draws(spread, P=400, G=8, temperature=1.0):
    keys = jax.random.split(jax.random.key(3), (P, G))
    found = spread_out(keys, jnp.broadcast_to(jnp.log(PI), (P, 3)), Sampling(temperature, spread=spread))
    return jax.tree.map(lambda x: np.asarray(x).reshape(P, G), found)


@pytest.mark.slow
def test_groups_are_closer_to_the_policy_and_all_together_as_close():
    counts = {step: np.stack([(draws(step).token == a).sum(1) for a in range(3)], 1) for step in (0.0, 2.0, 5.0)}
    errors = [float(sampling_error(counts[step], np.tile(PI, (400, 1)))) for step in (0.0, 2.0, 5.0)]
    assert max(errors[1:]) < 0.9 * errors[0], errors
    for one in counts.values():
        np.testing.assert_allclose(one.mean(0) / 8, PI, atol=0.06)


def test_what_a_row_is_drawn_from():
    """By hand, from the rows before it; nothing is less than RAREST as likely as before normalising."""
    found = draws(3.0, P=5)
    for p in range(5):
        counts = np.zeros(3)
        for g in range(8):
            tilt = np.maximum(np.exp(-3 * (counts / max(g, 1) - PI)), RAREST) if g else np.ones(3)
            q = PI * tilt / (PI * tilt).sum()
            np.testing.assert_allclose(found.logprob[p, g], np.log(q[found.token[p, g]]), atol=1e-5)
            np.testing.assert_allclose(found.entropy[p, g], -(q * np.log(q)).sum(), atol=1e-5)
            counts[found.token[p, g]] += 1


@pytest.mark.slow
def test_a_spread_of_nothing_is_the_plain_draw():
    keys = jax.random.split(jax.random.key(3), (400, 8))
    plain = draw(keys.reshape(-1), jnp.broadcast_to(jnp.log(PI), (3200, 3)), Sampling(1.0))
    np.testing.assert_array_equal(draws(0.0).token.reshape(-1), plain.token)


@pytest.mark.slow
def test_the_sampler_spreads_first_tokens_alone():
    asked, mask = prompts()
    keys = row_keys(SEED, np.arange(P * G).reshape(P, G))

    def run(spread):
        return jax.device_get(generate(MODEL, params(), asked, mask, keys, Sampling(np.float32(0.8), spread=np.float32(spread)),
                                       max_tokens=T, stop_ids=(7, 9), chunk=5))

    none, much = run(0.0), run(50.0)
    np.testing.assert_array_equal(none.tokens, reference().tokens)
    np.testing.assert_allclose(none.logprobs, reference().logprobs, atol=2e-6)
    same = (none.tokens[:, :, 0] == much.tokens[:, :, 0])
    assert same[:, 0].all() and not same.all() and (none.tokens[same] == much.tokens[same]).all()
