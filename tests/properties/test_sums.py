"""Every objective takes terms: the loss is the sum, and parts of a batch add up to the whole."""
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import property_inputs as inputs
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import take
from jaxrl_llm.objectives import composed, terms

close = np.testing.assert_allclose
ROWS, _ = inputs.parameters("OBJECTIVES", objectives.names())
FIRST = {slug: case for slug, case in reversed(ROWS)}  # the first case of each
BOTH = (("kl", {"coef": 0.2}), ("entropy", {"coef": 0.1}))


def run(objective, logprobs, rollouts, advantages):
    (loss, (metrics, _)), slope = jax.value_and_grad(objective.update, has_aux=True)(
        jnp.asarray(logprobs), rollouts, jnp.asarray(advantages), objective.init())
    return float(loss), {name: float(value) for name, value in metrics.items()}, np.asarray(slope)


@functools.cache
def with_terms(slug):
    """An objective with both terms, without them, and its case."""
    case = FIRST[slug]
    base = objectives.make(slug, **case.hyper)
    return composed(base, tuple(terms.make(name, **options) for name, options in BOTH)), base, case


QUICK = {"ppo_clip", "gspo", "topr", "c3po"}


@pytest.mark.parametrize(
    "slug", [pytest.param(slug, marks=[] if slug in QUICK else [pytest.mark.slow]) for slug in objectives.names()])
def test_every_objective_takes_them(slug):
    """The loss is the sum, tokens that the objective leaves out have no term, and parts of a batch add up to the whole."""
    whole, base, case = with_terms(slug)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logprobs, rollouts, A = inputs.logprobs(5), inputs.batch(5, case), inputs.advantages(5)
    current = jnp.abs(inputs.logprobs(6))
    rollouts = rollouts.replace(extras={**rollouts.extras, "current_entropies": current})
    loss, metrics, slope = run(whole, logprobs, rollouts, A)
    plain, others, plain_slope = run(base, logprobs, rollouts, A)
    share = np.asarray(whole.weights(rollouts)["term/kl"])
    tokens = np.asarray(rollouts.token_mask)
    assert share.sum() > 0 and not share[~tokens].any()
    own = np.asarray(base.weights(rollouts)[base.shares])
    close(share.sum(), own.sum() if own.ndim == 3 else own[tokens.any(-1)].sum(), rtol=1e-5)
    d = np.where(tokens, rollouts.ref_logprobs - logprobs, 0)
    kl, entropy = np.clip(np.exp(d) - d - 1, -10, 10), np.where(tokens, current, 0)
    expert = np.zeros_like(tokens) if "expert" not in rollouts.extras else np.asarray(rollouts.extras["expert"])
    drawn = ~(expert[..., None] if expert.ndim == 2 else expert)
    close(loss, plain + 0.2 * (share * kl).sum() - 0.1 * (share * drawn * entropy).sum(), rtol=2e-5, atol=1e-6)
    assert {*metrics} == {*others, "kl"} and {*whole.needs} == {*base.needs, "ref_logprobs", "current_entropies"}
    assert np.abs(slope - plain_slope)[share > 0].max() > 0 and not slope[~tokens].any()
    if whole.whole_batch:
        return
    weighed, half = rollouts.replace(loss_weights=whole.weights(rollouts)), inputs.P // 2
    parts = [run(whole, logprobs[i:i + half], take(weighed, i, half), A[i:i + half]) for i in (0, half)]
    close(sum(part[0] for part in parts), loss, rtol=2e-5, atol=1e-6)
    close(np.concatenate([part[2] for part in parts]), slope, rtol=2e-4, atol=1e-6)
    close(sum(part[1]["kl"] for part in parts), metrics["kl"], rtol=2e-5)
