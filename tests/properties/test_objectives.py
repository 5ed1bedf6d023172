"""Rules that every registered objective obeys, above all: the parts of a batch add up to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import property_inputs as inputs
import pytest
from hypothesis import given, settings, strategies

from jaxrl_llm import objectives
from jaxrl_llm.rollouts import take

ROWS, IDS = inputs.parameters("OBJECTIVES", objectives.names())
each = pytest.mark.parametrize("slug, case", ROWS, ids=IDS)
few = settings(max_examples=5, deadline=None, derandomize=True)
seeds = given(seed=strategies.integers(0, 2**20))
G, P, T = inputs.G, inputs.P, inputs.T


@pytest.fixture(autouse=True, scope="module")
def strict():
    with jax.numpy_rank_promotion("raise"):
        yield


def run(objective, logprobs, rollouts, advantages):
    """(loss, (metrics, state)), gradient with respect to the log-probs."""
    return jax.value_and_grad(objective.update, has_aux=True)(logprobs, rollouts, advantages, objective.init())


def skip_if_exempt(case, name):
    if name in case.exempt:
        pytest.skip(case.exempt[name])


def sample(seed, case, shape=(P, G, T), **kw):
    return inputs.logprobs(seed, shape), inputs.batch(seed, case, shape, **kw), inputs.advantages(seed, shape)


@each
@few
@seeds
def test_padding_changes_nothing(slug, case, seed):
    skip_if_exempt(case, "padding")
    objective = objectives.make(slug, **case.hyper)
    logprobs, rollouts, advantages = sample(seed, case)
    expected, gradient = run(objective, logprobs, rollouts, advantages)
    actual, padded = run(objective, *jax.tree.map(inputs.pad, (logprobs, rollouts, advantages)))
    inputs.same(actual, expected)
    inputs.same(padded[:P, :G, :T], gradient)
    for beyond in (padded[P:], padded[:, G:], padded[:, :, T:]):
        assert not np.any(np.asarray(beyond))


@each
@few
@seeds
def test_order_of_prompts_and_rollouts_does_not_matter(slug, case, seed):
    skip_if_exempt(case, "permutation")
    objective = objectives.make(slug, **case.hyper)
    rng = np.random.default_rng(seed)
    orders = rng.permutation(P), rng.permutation(G)
    arguments = sample(seed, case)
    expected, gradient = run(objective, *arguments)
    actual, other = run(objective, *jax.tree.map(lambda x: inputs.permute(x, *orders), arguments))
    inputs.same(actual, expected)
    inputs.same(other, inputs.permute(gradient, *orders))


@each
@few
@seeds
def test_micro_batches_add_up(slug, case, seed):
    objective = objectives.make(slug, **case.hyper)
    if objective.whole_batch:
        pytest.skip("declares that its mini-batch must not be split")
    logprobs, rollouts, advantages = sample(seed, case)
    (loss, (metrics, state)), gradient = run(objective, logprobs, rollouts, advantages)
    whole = rollouts.replace(loss_weights=objective.weights(rollouts))
    half = P // 2
    parts = [run(objective, logprobs[i : i + half], take(whole, i, half), advantages[i : i + half]) for i in (0, half)]
    (first, second), gradients = [value for value, _ in parts], [gradient for _, gradient in parts]
    inputs.same(first[0] + second[0], loss)
    inputs.same(jnp.concatenate(gradients), gradient)
    for name, value in metrics.items():
        combine = np.maximum if name.startswith("max/") else np.add
        inputs.same(combine(first[1][0][name], second[1][0][name]), value)
    for part in (first, second):
        inputs.same(part[1][1], state, rtol=0, atol=0)


@each
@few
@seeds
def test_masked_tokens_have_exactly_no_gradient(slug, case, seed):
    logprobs, rollouts, advantages = sample(seed, case)
    result, gradient = run(objectives.make(slug, **case.hyper), logprobs, rollouts, advantages)
    assert inputs.finite((result, gradient))
    assert np.all(np.asarray(gradient)[~np.asarray(rollouts.token_mask)] == 0)


@each
@pytest.mark.parametrize("edge", ["invalid", "empty"])
def test_a_batch_without_tokens_has_loss_and_gradient_zero(slug, case, edge):
    result, gradient = run(objectives.make(slug, **case.hyper), *sample(0, case, edge=edge))
    assert float(result[0]) == 0 and not np.any(np.asarray(gradient)) and inputs.finite(result)


@each
def test_group_of_one_is_finite(slug, case):
    skip_if_exempt(case, "group_of_one")
    assert inputs.finite(run(objectives.make(slug, **case.hyper), *sample(0, case, shape=(P, 1, T))))


@each
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_extreme_ratios_have_finite_gradients(slug, case, shift):
    logprobs, rollouts, advantages = sample(0, case)
    assert inputs.finite(run(objectives.make(slug, **case.hyper), logprobs + shift, rollouts, advantages))


@each
def test_jit_and_vmap_agree_with_eager(slug, case):
    objective = objectives.make(slug, **case.hyper)
    batches = [sample(seed, case) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    actual = jax.jit(jax.vmap(lambda arguments: run(objective, *arguments)))(stacked)
    for i, arguments in enumerate(batches):
        inputs.same(jax.tree.map(lambda x: x[i], actual), run(objective, *arguments))


@each
def test_float32_agrees_with_float64(slug, case):
    skip_if_exempt(case, "float64")
    objective = objectives.make(slug, **case.hyper)
    arguments = sample(3, case)
    single = run(objective, *arguments)
    with jax.enable_x64(True):
        exact = run(objective, *jax.tree.map(inputs.double, arguments))
        assert exact[1].dtype == jnp.float64
        inputs.same(single, exact, rtol=1e-4, atol=1e-5)


@each
def test_only_the_logprobs_are_differentiated(slug, case):
    logprobs, rollouts, advantages = sample(0, case)
    objective = objectives.make(slug, **case.hyper)

    def loss(advantages, ref):
        return objective.update(logprobs, rollouts.replace(ref_logprobs=ref), advantages, objective.init())[0]

    gradient = jax.grad(loss, argnums=(0, 1))(advantages, rollouts.ref_logprobs)
    assert not any(np.any(np.asarray(x)) for x in gradient)
