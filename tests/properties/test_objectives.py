"""Rules that every registered objective obeys, above all: the parts of a batch add up to the whole."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import property_inputs as inputs
import pytest
from hypothesis import assume, given, settings, strategies

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Role, take
from jaxrl_llm.learning.step import loss_terms

ROWS, IDS = inputs.parameters("OBJECTIVES", objectives.names())
each = inputs.each("row", list(range(len(ROWS))), ROWS, IDS)
first = inputs.first("row", list(range(len(ROWS))), ROWS, IDS)
few = settings(max_examples=3, deadline=None, derandomize=True)
seeds = given(seed=strategies.integers(0, 2**20))
G, P, T = inputs.G, inputs.P, inputs.T


@pytest.fixture(autouse=True, scope="module")
def strict():
    with jax.numpy_rank_promotion("raise"):
        yield


@functools.lru_cache(2)  # the properties of a row follow one another; programs of earlier ones need not be kept
def build(row):
    """The case, its objective, and `eager` of it, compiled once per shape for all tests."""
    slug, case = ROWS[row]
    objective = objectives.make(slug, **case.hyper)
    return case, objective, jax.jit(functools.partial(eager, objective))


def eager(objective, logprobs, rollouts, advantages):
    """((loss, (metrics, state)), gradient with respect to the log-probs)."""
    return jax.value_and_grad(objective.update, has_aux=True)(logprobs, rollouts, advantages, objective.init())


def skip_if_exempt(case, name):
    if name in case.exempt:
        pytest.skip(case.exempt[name])


def sample(seed, case, shape=(P, G, T), **kw):
    return inputs.logprobs(seed, shape), inputs.batch(seed, case, shape, **kw), inputs.advantages(seed, shape)


@each
@few
@seeds
def test_padding_changes_nothing(row, seed):
    case, _, run = build(row)
    skip_if_exempt(case, "padding")
    arguments = sample(seed, case)
    expected, gradient = run(*arguments)
    actual, padded = run(*jax.tree.map(inputs.pad, arguments))
    inputs.same(actual, expected)
    inputs.same(padded[:P, :G, :T], gradient)
    for beyond in (padded[P:], padded[:, G:], padded[:, :, T:]):
        assert not np.any(np.asarray(beyond))


@pytest.mark.slow
@first
@few
@seeds
def test_order_of_prompts_and_rollouts_does_not_matter(row, seed):
    case, _, run = build(row)
    skip_if_exempt(case, "permutation")
    rng = np.random.default_rng(seed)
    orders = rng.permutation(P), rng.permutation(G)
    arguments = sample(seed, case)
    expected, gradient = run(*arguments)
    actual, other = run(*jax.tree.map(lambda x: inputs.permute(x, *orders), arguments))
    inputs.same(actual, expected)
    inputs.same(other, inputs.permute(gradient, *orders))


@each
@few
@seeds
def test_micro_batches_add_up(row, seed):
    case, objective, run = build(row)
    if objective.whole_batch:
        pytest.skip("declares that its mini-batch must not be split")
    logprobs, rollouts, advantages = sample(seed, case)
    (loss, (metrics, state)), gradient = run(logprobs, rollouts, advantages)
    whole = rollouts.replace(loss_weights=objective.weights(rollouts))
    half = P // 2
    parts = [run(logprobs[i : i + half], take(whole, i, half), advantages[i : i + half]) for i in (0, half)]
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
def test_masked_tokens_have_exactly_no_gradient(row, seed):
    case, _, run = build(row)
    logprobs, rollouts, advantages = sample(seed, case)
    result, gradient = run(logprobs, rollouts, advantages)
    assert inputs.finite((result, gradient))
    assert np.all(np.asarray(gradient)[~np.asarray(rollouts.token_mask)] == 0)


@functools.lru_cache(2)
def as_trained(row):
    """`eager` as a trainer calls it, compiled: with weights made of what was recorded, whatever is in the holes."""
    _, objective, _ = build(row)

    def outcome(logprobs, rollouts, advantages):
        return eager(objective, logprobs, rollouts.replace(loss_weights=objective.weights(rollouts)), advantages)

    return jax.jit(outcome)


@each
@few
@seeds
def test_what_others_wrote_into_a_rollout_changes_nothing(row, seed):
    """Tokens that are seen and not trained have exactly no gradient, and no record of them has an influence."""
    case, run = build(row)[0], as_trained(row)
    arguments = sample(seed, case)
    trained = np.asarray(arguments[1].token_mask)
    outcome = run(*inputs.spoil(arguments, trained, seed))
    jax.tree.map(np.testing.assert_array_equal, outcome, run(*arguments))
    assert np.all(np.asarray(outcome[1])[~trained] == 0)


@each
@few
@seeds
def test_a_rollout_with_holes_is_worth_what_it_is_without_them(row, seed):
    """The successor of a token is the next trained one, and a position is a number of trained tokens."""
    case, run = build(row)[0], as_trained(row)
    skip_if_exempt(case, "holes")
    arguments = sample(seed, case)
    trained = np.asarray(arguments[1].token_mask)
    assume(np.any(trained[..., 1:] & ~trained[..., :-1]))
    value, gradient = run(*arguments)
    expected, packed = run(*(inputs.squeeze(x, trained) for x in arguments))
    inputs.same(value, expected)
    inputs.same(inputs.squeeze(gradient, trained), packed)


@each
@pytest.mark.parametrize("edge", ["invalid", "empty"])
def test_a_batch_without_tokens_has_loss_and_gradient_zero(row, edge):
    case, _, run = build(row)
    result, gradient = run(*sample(0, case, edge=edge))
    assert float(result[0]) == 0 and not np.any(np.asarray(gradient)) and inputs.finite(result)


@pytest.mark.slow
@first
def test_group_of_one_is_finite(row):
    case, _, run = build(row)
    skip_if_exempt(case, "group_of_one")
    assert inputs.finite(run(*sample(0, case, shape=(P, 1, T))))


@first
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_extreme_ratios_have_finite_gradients(row, shift):
    case, _, run = build(row)
    logprobs, rollouts, advantages = sample(0, case)
    assert inputs.finite(run(logprobs + shift, rollouts, advantages))


@pytest.mark.slow
@first
def test_compiled_and_vmapped_agree_with_eager(row):
    case, objective, run = build(row)
    batches = [sample(seed, case) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    mapped = jax.jit(jax.vmap(functools.partial(eager, objective)))(*stacked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as those of float64, which plain numpy arrays could bring
        on_host = eager(objective, *jax.tree.map(np.asarray, batches[0]))
    inputs.same(run(*batches[0]), on_host)
    for i, arguments in enumerate(batches):
        inputs.same(jax.tree.map(lambda x: x[i], mapped), run(*arguments))


@first
def test_float32_agrees_with_float64(row):
    case, _, run = build(row)
    skip_if_exempt(case, "float64")
    arguments = sample(3, case)
    single = run(*arguments)
    with jax.enable_x64(True):
        exact = run(*jax.tree.map(inputs.double, arguments))
        assert exact[1].dtype == jnp.float64
        inputs.same(single, exact, rtol=1e-4, atol=1e-5)


@first
def test_only_the_logprobs_are_differentiated(row):
    case, objective, _ = build(row)
    logprobs, rollouts, advantages = sample(0, case)

    def loss(advantages, ref):
        return objective.update(logprobs, rollouts.replace(ref_logprobs=ref), advantages, objective.init())[0]

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))(advantages, rollouts.ref_logprobs)
    assert not any(np.any(np.asarray(x)) for x in gradient)


@first
def test_what_reads_old_logprobs_says_so(row):
    """A change of `old_logprobs` changes loss or gradient of some batch if, and only if, the objective declares it."""
    case, objective, run = build(row)
    changed = False
    for seed in range(4):
        logprobs, rollouts, advantages = sample(seed, case)
        if rollouts.old_logprobs is None:
            pytest.skip("the case has no old log-probs")
        moved = rollouts.replace(old_logprobs=rollouts.old_logprobs - 0.37 * (1 + jnp.arange(T))[None, None])
        (before, (_, _)), gradient = run(logprobs, rollouts, advantages)
        (after, (_, _)), other = run(logprobs, moved, advantages)
        changed |= not (np.allclose(before, after) and np.allclose(gradient, other))
    assert changed == objective.reads_old


@first
def test_what_reads_log_probs_of_sampling_says_what_counts_where_they_are_unknown(row):
    assert build(row)[1].takes_unknown


@pytest.mark.slow
@first
def test_what_sampling_thinks_of_tokens_of_others_never_counts(row):
    """Of an expert, of another text, of hints: NaN or anything changes neither loss, gradient nor mismatch; hints have none."""
    case, objective, _ = build(row)
    logprobs, rollouts, advantages = sample(7, case)
    if rollouts.behavior_logprobs is None or objective.position is not None:
        pytest.skip("the case has no log-probs of sampling")
    rng, mask = np.random.default_rng(7), np.asarray(rollouts.mask)
    hint = rng.random(mask.shape) < 0.2
    role = np.where(hint, Role.HINT, rng.choice([Role.POLICY, Role.EXPERT, Role.ELSEWHERE], mask.shape))
    rollouts = rollouts.replace(mask=mask & ~hint, role=jnp.int8(np.where(mask, role, Role.PADDING)))
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))

    def outcome(behavior):
        def loss(x):
            return loss_terms(objective, x, jnp.ones_like(x), rollouts.replace(behavior_logprobs=behavior), advantages,
                              objective.init())
        (value, (metrics, _)), gradient = jax.value_and_grad(loss, has_aux=True)(logprobs)
        return value, metrics, gradient

    others = np.asarray(rollouts.role) != Role.POLICY
    expected = outcome(rollouts.behavior_logprobs)
    for unknown in (np.nan, -50.0):
        found = outcome(jnp.where(others, unknown, rollouts.behavior_logprobs))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.all(np.asarray(expected[2])[mask & hint] == 0) and inputs.finite(expected)
