"""Rules that every registered estimator obeys."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import property_inputs as inputs
import pytest
from hypothesis import assume, given, settings, strategies

from jaxrl_llm import advantages

ROWS, IDS = inputs.parameters("ESTIMATORS", advantages.names())
each = inputs.each("slug, case", ROWS, ROWS, IDS)
first = inputs.first("slug, case", ROWS, ROWS, IDS)
few = settings(max_examples=3, deadline=None, derandomize=True)
seeds = given(seed=strategies.integers(0, 2**20))
G, P, T = inputs.G, inputs.P, inputs.T


@pytest.fixture(autouse=True, scope="module")
def strict():
    with jax.numpy_rank_promotion("raise"):
        yield


@functools.lru_cache(4)  # the properties of a row follow one another; programs of earlier ones need not be kept
def compiled(of, slug, case):
    """`of(slug, case, ...)`, compiled once per shape for all tests."""
    return jax.jit(functools.partial(of, slug, case))


def eager(slug, case, rollouts):
    """(advantages, state) of the first update."""
    estimator = advantages.make(slug, **case.hyper)
    return estimator.update(rollouts, estimator.init())


def run(slug, case, rollouts):
    return compiled(eager, slug, case)(rollouts)


def skip_if_exempt(case, name):
    if name in case.exempt:
        pytest.skip(case.exempt[name])


@each
@few
@seeds
def test_padding_changes_nothing(slug, case, seed):
    skip_if_exempt(case, "padding")
    rollouts = inputs.batch(seed, case)
    expected, state = run(slug, case, rollouts)
    padded, padded_state = run(slug, case, jax.tree.map(inputs.pad, rollouts))
    inputs.same(padded[:P, :G, :T], expected)
    inputs.same(padded_state, state)
    for beyond in (padded[P:], padded[:, G:], padded[:, :, T:]):
        assert not np.any(np.asarray(beyond))


@each
@few
@seeds
def test_order_of_prompts_and_rollouts_does_not_matter(slug, case, seed):
    skip_if_exempt(case, "permutation")
    rng = np.random.default_rng(seed)
    orders = rng.permutation(P), rng.permutation(G)
    rollouts = inputs.batch(seed, case)
    expected, state = run(slug, case, rollouts)
    actual, other_state = run(slug, case, jax.tree.map(lambda x: inputs.permute(x, *orders), rollouts))
    inputs.same(actual, inputs.permute(expected, *orders))
    if "permutation_of_state" not in case.exempt:
        inputs.same(other_state, state)


@each
@few
@seeds
def test_masked_tokens_get_exactly_zero_and_others_are_finite(slug, case, seed):
    rollouts = inputs.batch(seed, case)
    values, _ = run(slug, case, rollouts)
    assert values.shape == (P, G, T) and inputs.finite(values)
    assert np.all(np.asarray(values)[~np.asarray(rollouts.token_mask)] == 0)


def everything(slug, case, rollouts):
    """All that an estimator computes of a batch: advantages, state, and targets, metrics and filter where it has them."""
    estimator = advantages.make(slug, **case.hyper)
    values, state = eager(slug, case, rollouts)
    also = {} if estimator.value_targets is None else {
        name: estimator.value_targets(rollouts, monte_carlo) for name, monte_carlo in (("targets", False), ("returns", True))}
    if estimator.metrics is not None:
        also["metrics"] = estimator.metrics(rollouts, values, estimator.init())
    if estimator.keeps is not None:
        also["kept"] = estimator.keeps(rollouts)
    return values, state, also


@each
@few
@seeds
def test_what_others_wrote_into_a_rollout_changes_nothing(slug, case, seed):
    """Tokens that are seen and not trained get exactly 0, and no record of them has an influence."""
    rollouts = inputs.batch(seed, case)
    trained = np.asarray(rollouts.token_mask)
    spoiled = inputs.spoil(rollouts, trained, seed)
    run_all = compiled(everything, slug, case)
    actual = run_all(spoiled)
    jax.tree.map(np.testing.assert_array_equal, actual, run_all(rollouts))
    for of_tokens in (actual[0], *(actual[2][name] for name in ("targets", "returns") if name in actual[2])):
        assert np.all(np.asarray(of_tokens)[~trained] == 0)


@each
@few
@seeds
def test_a_rollout_with_holes_is_worth_what_it_is_without_them(slug, case, seed):
    """The successor of a token is the next trained one, and a position is a number of trained tokens."""
    skip_if_exempt(case, "holes")
    rollouts = inputs.batch(seed, case)
    trained = np.asarray(rollouts.token_mask)
    assume(np.any(trained[..., 1:] & ~trained[..., :-1]))
    run_all = compiled(everything, slug, case)
    inputs.same(inputs.squeeze(run_all(rollouts), trained), run_all(inputs.squeeze(rollouts, trained)))


@each
@pytest.mark.parametrize("edge", ["equal", "invalid", "empty"])
def test_a_batch_without_a_signal_has_advantages_of_exactly_zero(slug, case, edge):
    values, state = run(slug, case, inputs.batch(0, case, edge=edge))
    assert inputs.finite((values, state))
    if edge == "equal" and "equal" in case.exempt:
        assert np.any(np.asarray(values)), "the exemption is not needed"
    else:
        assert not np.any(np.asarray(values))


@pytest.mark.slow
@first
def test_group_of_one_is_finite(slug, case):
    skip_if_exempt(case, "group_of_one")
    assert inputs.finite(run(slug, case, inputs.batch(0, case, shape=(P, 1, T))))


@pytest.mark.slow
@first
def test_jit_and_vmap_agree_with_eager(slug, case):
    batches = [inputs.batch(seed, case) for seed in (0, 1)]
    estimator = advantages.make(slug, **case.hyper)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    actual = jax.jit(jax.vmap(estimator.update, in_axes=(0, None)))(stacked, estimator.init())
    for i, rollouts in enumerate(batches):
        on_host = jax.tree.map(np.asarray, rollouts)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as those of float64, which plain numpy arrays could bring
            advantage, state = estimator.update(on_host, estimator.init())
            if estimator.metrics is not None:
                estimator.metrics(on_host, advantage, estimator.init())
        inputs.same(jax.tree.map(lambda x: x[i], actual), (advantage, state))


@first
def test_float32_agrees_with_float64(slug, case):
    skip_if_exempt(case, "float64")
    rollouts = inputs.batch(3, case)
    single, _ = run(slug, case, rollouts)
    with jax.enable_x64(True):
        exact, _ = run(slug, case, jax.tree.map(inputs.double, rollouts))
        assert exact.dtype == jnp.float64
        inputs.same(single, exact, rtol=1e-4, atol=1e-5)


@each
def test_nothing_flows_back_through_an_advantage(slug, case):
    rollouts = inputs.batch(0, case)

    def total(rewards, old):
        values, _ = eager(slug, case, rollouts.replace(rewards=rewards, old_logprobs=old))
        return jnp.sum(values**2)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))(rollouts.rewards, rollouts.old_logprobs)
    assert not any(np.any(np.asarray(x)) for x in gradient)


@pytest.mark.slow
@first
def test_the_dtype_of_rewards_does_not_matter(slug, case):
    rollouts = inputs.batch(5, case)
    values = rollouts.rewards, rollouts.reward_components
    whole = jax.tree.map(lambda x: (np.asarray(x) > 0.3).astype(np.float32), values)  # 0 and 1 are exact in all dtypes

    def with_dtype(dtype):
        rewards, components = jax.tree.map(lambda x: x.astype(dtype), whole)
        return eager(slug, case, rollouts.replace(rewards=rewards, reward_components=components))

    expected = with_dtype(np.float32)
    for dtype in (np.int32, np.bool_, np.float16, jnp.bfloat16, np.float64):
        jax.tree.map(np.testing.assert_array_equal, with_dtype(dtype), expected)
