"""Completions that begin with given tokens: what follows, log-probs and entropies of all of it, ends, and rows without."""
import jax
import numpy as np
import pytest
from test_sampler import MODEL, SEED, STOP, G, P, T, full_logits, params, prompts, reference

from jaxrl_llm.engines import Sampling, generate, row_keys
from jaxrl_llm.engines.sampler import Forced


def run(tokens, count, temperature=0.8):
    asked, mask = prompts()
    keys = row_keys(SEED, np.arange(P * G).reshape(P, G))
    forced = Forced(np.asarray(tokens, np.int32), np.asarray(count, np.int32))
    return jax.device_get(generate(MODEL, params(), asked, mask, keys, Sampling(np.float32(temperature)), max_tokens=T,
                                   stop_ids=(STOP, 9), chunk=5, forced=forced))


@pytest.mark.slow
def test_rows_that_are_forced_along_their_own_completion_are_the_same_completion():
    """Also rows without a forced token, and those that are forced to their end."""
    free = reference()
    count = np.minimum(np.arange(P * G).reshape(P, G) % (T + 1), free.mask.sum(-1))
    found = run(free.tokens, count)
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(free, name))
    np.testing.assert_allclose(found.logprobs, free.logprobs, atol=2e-6)
    np.testing.assert_allclose(found.entropies, free.entropies, atol=2e-6)
    assert (count == 0).any() and (count == free.mask.sum(-1)).any()


@pytest.mark.parametrize("temperature", (0.8, 0.0))
def test_what_others_wrote_has_the_policys_log_probs(temperature):
    """By a full forward pass; the rest of the row goes on behind it, and a stop token in it ends the row."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(10, 60, (P, G, T))
    count = np.full((P, G), 4)
    tokens[1, 2, 3], count[2, 1], count[0, 3] = STOP, T, 0
    found = run(tokens, count, temperature)
    assert found.mask[1, 2].sum() == 4 and found.stopped[1, 2] and not found.stopped[2, 1] and found.mask[2, 1].all()
    for p, g in ((0, 0), (1, 2), (2, 1), (2, 3)):
        n, k = int(found.mask[p, g].sum()), int(count[p, g])
        np.testing.assert_array_equal(found.tokens[p, g, :k], tokens[p, g, :k])
        logp = jax.nn.log_softmax(full_logits(p, found.tokens[p, g, :n]) / (temperature or 1.0))
        np.testing.assert_allclose(found.logprobs[p, g, :n], logp[np.arange(n), found.tokens[p, g, :n]], atol=2e-5)
    if temperature:
        np.testing.assert_array_equal(found.tokens[0, 3], reference().tokens[0, 3])
