"""V0: adapter against float64 numpy, the inputs of the head, loss examples, references, learning."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.values import in_context, v0, v0_training
from jaxrl_llm.values.v0_prior import sample_tasks

close = np.testing.assert_allclose
N, Q, F = 12, 5, 6
MODEL = v0.V0(v0.Head(F, width=16, layers=2, heads=2), v0.QueryAdapter(queries=2, size=3, heads=3, hidden=8), states=7)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def context():
    """(context [N, F], outcomes [N], mask [N] with two rows of padding, queries [Q, F])"""
    rng = np.random.default_rng(0)
    rows, outcomes = rng.normal(size=(N, F)), rng.integers(0, 5, N) / 4
    return *map(lambda x: jnp.asarray(x, jnp.float32), (rows, outcomes)), jnp.arange(N) < N - 2, \
        jnp.asarray(rng.normal(size=(Q, F)), jnp.float32)


logits = jax.jit(MODEL.logits)


# Adapter


def norm64(x, p):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p["scale"] + p["bias"]


def adapter64(p, states, mask):
    """One prompt, without padding, by the equations."""
    h = states[mask]
    def dense(name, x):
        return x @ p[name]["kernel"] + p[name]["bias"]
    x = norm64(dense("mlp_in", h[-1]), p["mlp_norm"])
    x = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])
    q, u = p["static"] + dense("mlp_out", x).reshape(2, 3), dense("tokens", h)
    out = np.zeros((2, 3))
    for head in range(3):  # one number per head
        scores = np.outer(norm64(q, p["query_norm"])[:, head], norm64(u, p["key_norm"])[:, head])  # scale 1 / sqrt(3 / 3)
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        out[:, head] = weights @ u[:, head]
    return dense("out", out).reshape(-1)


def test_adapter_agrees_with_the_equations(params):
    rng = np.random.default_rng(1)
    tree = jax.tree.map(lambda x: jnp.asarray(x + 0.3 * rng.normal(size=x.shape), jnp.float32), params["adapter"])
    states = rng.normal(size=(3, 4, 7)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]], bool)
    encode = jax.jit(lambda s, m: MODEL.encode({"adapter": tree}, s, m))
    z = encode(states, mask)
    expected = [adapter64(jax.tree.map(np.float64, tree), s.astype(float), m) for s, m in zip(states, mask)]
    close(z, expected, rtol=2e-4, atol=2e-5)
    states[~mask] = 1e6  # padding on either side is not read
    close(encode(states, mask), z, rtol=1e-6)


def test_adapter_starts_from_static_queries(params):
    assert not np.any(params["adapter"]["mlp_out"]["kernel"])
    states = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 7)), jnp.float32)
    encode = jax.jit(lambda p, h: MODEL.encode(p, h, jnp.ones((1, 4), bool)))
    # Another token is the last: as long as the MLP says nothing, the order does not matter.
    close(encode(params, states), encode(params, states[:, ::-1]), rtol=1e-5, atol=1e-6)
    noise = jax.random.normal(jax.random.key(3), params["adapter"]["mlp_out"]["kernel"].shape)
    moved = {"adapter": params["adapter"] | {"mlp_out": {"kernel": noise, "bias": jnp.zeros(6)}}}
    assert not np.allclose(encode(moved, states), encode(moved, states[:, ::-1]))
    train = jax.jit(lambda key: MODEL.encode(moved, states, jnp.ones((1, 4), bool), dropout_key=key))
    dropped = [train(jax.random.key(k)) for k in (1, 1, 2)]
    assert np.array_equal(dropped[0], dropped[1]) and not np.allclose(dropped[0], dropped[2])


# Head


def test_the_order_of_the_context_does_not_matter(params, context):
    rows, outcomes, mask, queries = context
    order = np.random.default_rng(3).permutation(N)
    expected = logits(params, *context)
    close(logits(params, rows[order], outcomes[order], mask[order], queries), expected, atol=1e-5)
    flipped = logits(params, rows, 1 - outcomes, mask, queries)
    assert np.abs(flipped - expected).max() > 1e-3
    assert not np.allclose(logits(params, rows, outcomes[order], mask, queries), expected, atol=1e-4)


def test_queries_see_the_context_and_not_each_other(params, context):
    rows, outcomes, mask, queries = context
    jacobian = jax.jit(jax.jacobian(lambda q: MODEL.logits(params, rows, outcomes, mask, q)[:, 1]))(queries)
    others = ~np.eye(Q, dtype=bool)
    assert not np.any(np.asarray(jacobian)[others]) and np.all(np.any(np.asarray(jacobian)[~others], axis=-1))


def test_padding_of_the_context_is_not_read(params, context):
    rows, outcomes, mask, queries = context
    expected = logits(params, *context)
    garbage = logits(params, rows.at[N - 2:].set(jnp.nan), outcomes.at[N - 2:].set(jnp.nan), mask, queries)
    close(garbage, expected, rtol=1e-6)
    close(logits(params, rows[:N - 2], outcomes[:N - 2], mask[:N - 2], queries), expected, atol=1e-5)
    nothing = logits(params, rows, outcomes, jnp.zeros(N, bool), queries)
    assert np.isfinite(nothing).all() and np.ptp(nothing[:, 0]) < 1e-6


def test_units_of_the_features_do_not_matter(params, context):
    rows, outcomes, mask, queries = context
    close(logits(params, 7 * rows + 3, outcomes, mask, 7 * queries + 3), logits(params, *context), atol=1e-3)


def test_several_policies_at_once(params, context):
    rows, outcomes, mask, queries = context
    stacked = [jnp.stack([x, y]) for x, y in ((rows, rows), (outcomes, 1 - outcomes), (mask, mask))]
    p = jax.jit(MODEL.predict)(params, *stacked, queries)
    assert p.shape == (2, Q)
    single = logits(params, rows, 1 - outcomes, mask, queries)
    close(p[1], jax.nn.softmax(single, axis=-1)[:, 1], rtol=1e-5)


def test_the_context_forgets_the_oldest_and_hides_the_judged(params, context):
    rows, outcomes, _, queries = context
    ring = v0.empty_context(4, F)
    assert not ring.real.any()
    remember = jax.jit(v0.remember)
    for start in (0, 3):
        part = slice(start, start + 3)
        ring = remember(ring, rows[part], outcomes[part], jnp.arange(3) + start, jnp.array([True, True, start == 0]))
    assert sorted(ring.rows["prompt"].tolist()) == [1, 2, 3, 4] and ring.real.all()
    p = jax.jit(v0.judge, static_argnums=0)(MODEL, params, ring, queries, jnp.array([2, 9, 0, 7, 8]))
    kept = jnp.isin(jnp.arange(N), jnp.array([1, 3, 4]))
    close(p, v0.success(logits(params, rows, outcomes, kept, queries)), atol=1e-5)


def test_weights_on_disk(params, context, tmp_path):
    path = v0.save(tmp_path / "small" / "v0.npz", MODEL, params)
    model, restored = v0.load(path)
    assert model == MODEL and jax.tree.structure(restored) == jax.tree.structure(params)
    close(logits(restored, *context), logits(params, *context), atol=2e-2)
    head = v0.V0(MODEL.head)
    assert v0.load(v0.save(tmp_path / "head.npz", head, {"head": params["head"]}))[0] == head
    np.savez(tmp_path / "other.npz", x=1)
    with pytest.raises(ValueError, match="holds no V0 weights"):
        v0.load(tmp_path / "other.npz")


# Loss


def test_loss_example():
    values = jnp.array([[0, 1], [0, -0.5], [0.2, 0.4], [0.1, 0.3]])
    labels = jnp.array([1, 0.25, 0.75, 0])
    positive, negative, real = v0_training.pairs(np.asarray(labels), 4)
    assert list(zip(positive, negative))[:2] == [(0, 1), (2, 3)] and real.tolist() == [True, True, False, False]
    total, parts = v0_training.loss(values, labels, positive, negative, real)
    close([parts["rank"], parts["cross_entropy"], total], [0.447280, 0.589654, 0.554061], atol=6e-7)
    shifted, others = v0_training.loss(values + jnp.array([0.0, 3.0]), labels, positive, negative, real)
    close(others["rank"], parts["rank"], rtol=1e-6)  # a context-wide offset does not help the ranking
    assert shifted > total + 0.5
    alone, parts = v0_training.loss(values, labels, positive, negative, np.zeros(4, bool))
    assert parts["rank"] == 0 and np.isfinite(alone)


def test_labels_and_pairs():
    close(v0_training.label(jnp.array([-1, -0.2, 0, 0.5, 3])), [0, 0.4, 0.5, 0.75, 1])
    positive, negative, real = v0_training.pairs(np.array([1, 0, 1, 0.6, 0.5, 0.2]), 5)
    assert list(zip(positive, negative))[:4] == [(0, 1), (2, 5), (3, 1), (4, 5)] and real.sum() == 4
    assert not v0_training.pairs(np.array([0.1, 0.2]), 3)[2].any()


# References


def test_ridge_takes_the_penalty_of_least_leave_one_out_error(context):
    rows, outcomes, mask, queries = context
    x, q = map(np.asarray, in_context.standardise(rows, mask, queries))
    close([x[:10].mean(0), x[:10].std(0)], [np.zeros(F), np.ones(F)], atol=1e-5)
    assert not x[10:].any()
    x, y = x[:10].astype(float), np.asarray(outcomes)[:10].astype(float)

    def fit(x, y, alpha, at):
        # Features of the whole are centred: centring those that remain makes the intercept free.
        centre = x.mean(0)
        w = np.linalg.solve((x - centre).T @ (x - centre) / F + alpha * np.eye(F), (x - centre).T @ (y - y.mean()) / F)
        return y.mean() + (at - centre) @ w

    errors = {}
    for alpha in (0.01, 0.1, 1.0, 10.0, 100.0):
        left_out = [fit(np.delete(x, i, 0), np.delete(y, i), alpha, x[i]) for i in range(10)]
        errors[alpha] = np.sum((np.array(left_out) - y) ** 2)
    best = min(errors, key=errors.get)
    close(jax.jit(in_context.ridge)(rows, outcomes, mask, queries), np.clip(fit(x, y, best, q), 0, 1), atol=1e-4)


def test_logistic_is_the_minimum_of_its_loss(context):
    rows, outcomes, mask, queries = context
    x, q = (np.asarray(v, float) for v in in_context.standardise(rows, mask, queries))
    x, y = x[:10] / np.sqrt(F), np.asarray(outcomes, float)[:10]
    rate = (y.sum() + 0.5) / 11
    w, offset = np.zeros(F), np.log(rate / (1 - rate))
    for _ in range(20):  # Newton on sum of cross-entropies + |w|^2 / 2
        p = 1 / (1 + np.exp(-x @ w - offset))
        w -= np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) + np.eye(F), x.T @ (p - y) + w)
    expected = 1 / (1 + np.exp(-(q / np.sqrt(F)) @ w - offset))
    close(in_context.logistic(rows, outcomes, mask, queries), expected, atol=1e-4)


def test_nearest_is_a_weighted_mean_of_the_most_similar(context):
    rows, outcomes, mask, queries = context
    x, q = map(np.asarray, in_context.standardise(rows, mask, queries))
    x, y = x[:10], np.asarray(outcomes)[:10]
    cosine = (q @ x.T) / np.linalg.norm(q, axis=1)[:, None] / np.linalg.norm(x, axis=1)
    for k in (3, 40):
        expected = []
        for row in cosine:
            best = np.argsort(-row)[:k]
            weight = np.exp(row[best] / 0.1)
            expected.append(weight @ y[best] / weight.sum())
        close(in_context.nearest(rows, outcomes, mask, queries, k=k), expected, rtol=2e-4)


def test_references_without_a_context_know_nothing(context):
    rows, outcomes, _, queries = context
    for reference in (in_context.context_mean, in_context.nearest, in_context.ridge, in_context.logistic):
        close(reference(rows, outcomes, jnp.zeros(N, bool), queries), [0.5] * Q, rtol=1e-6)


# Learning


def test_tasks_of_the_prior_are_what_they_say():
    tasks = sample_tasks(np.random.default_rng(0), 400, context=40, queries=8, features=F)
    again = sample_tasks(np.random.default_rng(0), 400, context=40, queries=8, features=F)
    assert all(np.array_equal(a, b) for a, b in zip(tasks, again))
    assert tasks.features.shape == (400, 40, F) and tasks.queries.shape == (400, 8, F)
    assert 0 <= tasks.success.min() < 0.01 and 0.99 < tasks.success.max() <= 1 and abs(tasks.success.mean() - 0.5) < 0.05
    assert set(np.unique(tasks.outcomes * 16)) == set(range(17)) and tasks.mask.sum(1).min() >= 1
    gap = tasks.outcomes.mean(1) - tasks.success.mean(1)
    assert np.corrcoef(tasks.outcomes.mean(1), tasks.success.mean(1))[0, 1] > 0.8 and abs(gap.mean()) < 0.02


def excess(p, truth):
    """Mean relative entropy of predictions to the true probabilities, nats."""
    p, q = np.clip(np.asarray(p, float), 1e-3, 1 - 1e-3), np.clip(truth.astype(float), 1e-6, 1 - 1e-6)
    return np.mean(q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p)))


@pytest.mark.slow
def test_a_head_fitted_to_the_prior_beats_the_context_mean_and_the_nearest_neighbours():
    model, losses = v0.V0(v0.Head(F, width=16, layers=2, heads=2)), []
    start = jax.jit(model.init)(jax.random.key(1))
    fitted = v0_training.fit_head(model, start, steps=200, batch=12, context=24, queries=16, learning_rate=6e-3,
                                  report=lambda step, value: losses.append((step, value)))
    assert [step for step, _ in losses] == list(range(20, 201, 20))
    tasks = sample_tasks(np.random.default_rng(7), 200, context=24, queries=16, features=F)
    head = jax.jit(jax.vmap(lambda t, p: v0.success(model.logits(p, t.features, t.outcomes, t.mask, t.queries)), (0, None)))
    error = {"fitted": excess(head(tasks, fitted), tasks.success), "fresh": excess(head(tasks, start), tasks.success)}
    for reference in (in_context.context_mean, in_context.nearest):
        answer = jax.vmap(lambda t: reference(t.features, t.outcomes, t.mask, t.queries))(tasks)
        error[reference.__name__] = excess(answer, tasks.success)
    assert error["fitted"] < 0.8 * min(error[name] for name in ("fresh", "context_mean", "nearest")), error


@pytest.mark.slow
def test_the_adapter_learns_which_tokens_make_a_prompt_hard():
    """Success depends on one of seven directions of a token that stands anywhere; half of the policies like it, half do not."""
    rng = np.random.default_rng(0)
    U, S = 500, 3
    states = rng.normal(size=(U, S, 7)).astype(np.float32)
    trait = np.sign(states[..., 2].sum(1))
    mask = np.ones((U, S), bool)

    def episodes(prompts):
        while True:
            rows = rng.permutation(prompts)[:24]
            outcomes = (rng.choice([-1, 1]) * trait[rows] > 0).astype(np.float32)
            yield v0_training.Episode(rows[:16], outcomes[:16], np.ones(16, bool), rows[16:], outcomes[16:],
                                      *v0_training.pairs(outcomes[16:], 8))

    model = v0.V0(v0.Head(6, width=16, layers=1, heads=2),
                  v0.QueryAdapter(queries=2, size=3, heads=3, hidden=4, dropout=0.0), 7)
    losses = []
    start = jax.jit(model.init)(jax.random.key(0))
    fitted = v0_training.fit_adapter(model, start, states, mask, episodes(np.arange(400)), steps=300, batch=4,
                                     learning_rate=1e-2, tune_head=True, report=lambda step, value: losses.append(value))
    unseen, right = episodes(np.arange(400, 500)), []
    def z(p, h):
        return model.encode(p, h, jnp.ones(h.shape[:2], bool))
    judge = jax.jit(lambda p, h, y, q: model.logits(p, z(p, h), y, y >= 0, z(p, q)))
    for _ in range(40):
        e = next(unseen)
        s = judge(fitted, states[e.context], e.outcomes, states[e.queries])
        right.append(((s[:, 1] > s[:, 0]) == (e.labels > 0.5)).mean())
    assert losses[-1] < 0.6 * losses[0] and np.mean(right) > 0.75, (losses[0], losses[-1], np.mean(right))


@pytest.mark.slow
def test_a_frozen_head_stays_as_it_is(params):
    episode = v0_training.Episode(np.arange(4), np.array([0, 1, 0, 1.0]), np.ones(4, bool), np.arange(4, 6),
                                  np.array([1.0, 0.0]), *v0_training.pairs(np.array([1.0, 0.0]), 2))
    states = np.random.default_rng(0).normal(size=(6, 4, 7))
    fitted = v0_training.fit_adapter(MODEL, params, states, np.ones((6, 4), bool), iter([episode] * 4), steps=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, fitted["head"], params["head"]))
    assert not np.array_equal(fitted["adapter"]["static"], params["adapter"]["static"])
