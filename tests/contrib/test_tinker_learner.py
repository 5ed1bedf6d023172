"""Losses, gradients and steps of Tinker's API equal plain JAX on one example at a time."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from server import MODEL, params

from jaxrl_llm import objectives
from jaxrl_llm.contrib.tinker.examples import Datum, micro_batches, view_of
from jaxrl_llm.contrib.tinker.learner import Adam, AdapterLearner, LoraShape
from jaxrl_llm.contrib.tinker.losses import TINKER, available, loss_of, summed
from jaxrl_llm.learning import accumulate
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import loss_terms
from jaxrl_llm.models import Transformer, lora
from jaxrl_llm.models.config import RopeScaling

LENGTHS = (5, 31, 12, 1, 20)


@pytest.fixture(scope="module")
def learner():
    return AdapterLearner(MODEL, params(), longest=64, budget=64)


def data(loss, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in LENGTHS:
        fields = {"weights": rng.choice([0, 0.5, -1.5], n).astype(np.float32)}
        if loss_of(loss).fields:
            fields |= {"logprobs": rng.normal(-5, 2, n).astype(np.float32),
                       "advantages": rng.normal(size=n).astype(np.float32)}
        made.append(Datum(*rng.integers(0, 259, (2, n)).astype(np.int32), fields))
    return made


def adapter_of(learner, shape=LoraShape(3), seed=1):
    """An adapter that changes something."""
    adapter = learner.create(shape, seed)
    for i, one in enumerate(adapter.tree.values()):
        one["b"] = 0.05 * jax.random.normal(jax.random.key(100 + i), one["b"].shape)
    return adapter


@functools.cache
def plain_logprobs():
    """`(tree, examples) -> f32[sum n]` by the whole matrix of logits, one example after the other, without any packing."""
    @jax.jit
    def of_one(tree, tokens, mask, targets):
        states, _, _ = MODEL.hidden_states(params(), tokens[None], mask[None], lora=tree)
        logits = jax.nn.log_softmax(MODEL.finished(states[0] @ MODEL.unembedding(params()).T), axis=-1)
        return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]

    def of_all(tree, examples):
        def padded(x):
            return jnp.pad(jnp.asarray(x), (0, 32 - len(x)))
        return jnp.concatenate([
            of_one(tree, padded(one.tokens), jnp.arange(32) < len(one.tokens), padded(one.targets))[:len(one.tokens)]
            for one in examples])
    return of_all


def plain_loss(name, p, weights, q, advantages):
    """Of the tokens of one example."""
    if name == "cross_entropy":
        return -p
    ratio, fixed = jnp.exp(p - q), jax.lax.stop_gradient
    bound = jnp.clip(ratio, 0.8, 1.2)
    marked = weights != 0
    shared = jnp.exp(fixed(jnp.sum(jnp.where(marked, p - q, 0)) / max(marked.sum(), 1)) + p - fixed(p))
    narrow = jnp.clip(shared, 1 - 3e-4, 1 + 4e-4)
    return {"importance_sampling": -ratio * advantages, "ppo": jnp.maximum(-ratio * advantages, -bound * advantages),
            "cispo": -fixed(jnp.minimum(ratio, 4)) * p * advantages,
            "dro": -p * advantages + 0.025 * (p - q) ** 2,
            "gspo": jnp.maximum(-shared * advantages, -narrow * advantages)}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINKER)
def test_losses_and_gradients_are_those_of_plain_jax(learner, name):
    adapter, examples = adapter_of(learner), data(name)
    fields = [[one.fields.get(key, one.fields["weights"]) for key in ("weights", "logprobs", "advantages")] for one in examples]
    logprobs, pull = jax.vjp(lambda tree: plain_logprobs()(tree, examples), adapter.tree)
    ends = np.cumsum(LENGTHS)[:-1]
    losses, cotangent = jax.vjp(lambda p: jnp.concatenate(
        [given[0] * plain_loss(name, one, *given) for one, given in zip(jnp.split(p, ends), fields, strict=True)]), logprobs)
    grads, = pull(cotangent(jnp.ones_like(losses))[0])
    result = learner.forward_backward(adapter, examples, name, {})
    assert [len(x) for x in result.logprobs] == list(LENGTHS)
    assert result.loss == pytest.approx(float(losses.sum()), rel=1e-5)
    np.testing.assert_allclose(np.concatenate(result.logprobs), logprobs, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(result.losses), losses, rtol=1e-5, atol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    assert scale > 0.01
    jax.tree.map(lambda own, g: np.testing.assert_allclose(own / scale, g / scale, atol=1e-5), adapter.grads, grads)
    once = learner.forward(adapter.tree, examples, name, {})
    assert once.loss == pytest.approx(result.loss, rel=1e-6)


@pytest.mark.slow
def test_gradients_add_up_and_a_step_is_that_of_optax(learner):
    adapter, examples = adapter_of(learner), data("cross_entropy")
    learner.forward_backward(adapter, examples[:2], "cross_entropy", {})
    learner.forward_backward(adapter, examples[2:], "cross_entropy", {})
    parts = adapter.grads
    whole = adapter_of(learner)
    learner.forward_backward(whole, examples, "cross_entropy", {})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), parts, whole.grads)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, 0.8, 0.97, 1e-6, weight_decay=0.1))
    expected, state = whole.tree, optimizer.init(whole.tree)
    for _ in range(3):
        updates, state = optimizer.update(whole.grads, state, expected)
        expected = optax.apply_updates(expected, updates)
        grads = whole.grads
        norm = learner.step(whole, Adam(0.01, 0.8, 0.97, 1e-6, 0.1, 0.5))
        assert norm == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6) and whole.grads is None
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole.tree, expected)
        learner.forward_backward(whole, examples, "cross_entropy", {})


def test_a_step_without_a_finite_gradient_is_refused(learner):
    adapter = adapter_of(learner)
    with pytest.raises(ValueError, match="call forward_backward first"):
        learner.step(adapter, Adam())
    before, adapter.grads = adapter.tree, jax.tree.map(lambda x: x * jnp.nan, adapter.tree)
    with pytest.raises(ValueError, match="norm nan; it was dropped"):
        learner.step(adapter, Adam())
    assert adapter.tree is before and adapter.grads is None


@pytest.mark.slow
def test_a_step_without_any_gradient_moves_nothing(learner):
    adapter = adapter_of(learner)
    for value in (1.0, 0.0):
        before, moments = adapter.tree, adapter.moments
        adapter.grads = jax.tree.map(lambda x: jnp.full_like(x, value), adapter.tree)
        assert (learner.step(adapter, Adam(0.01, weight_decay=0.1)) > 0) == bool(value) and adapter.grads is None
    jax.tree.map(np.testing.assert_array_equal, (adapter.tree, adapter.moments), (before, moments))


@pytest.mark.parametrize("settings", [
    {"beta1": 1.0}, {"beta2": 1.0}, {"beta2": 1 - 1e-12}, {"beta1": -0.1}, {"beta1": float("nan")}, {"eps": 0.0},
    {"eps": 1e-60}, {"eps": float("inf")}, {"weight_decay": 1e30}, {"weight_decay": -1.0},
    {"learning_rate": float("inf")}, {"learning_rate": 1e39}, {"learning_rate": -1e-4}, {"clip_norm": float("nan")},
    {"clip_norm": -1.0}])
def test_settings_with_which_adam_is_not_defined_are_refused_and_lose_no_gradient(learner, settings):
    """beta = 1 divides by 1 - beta^t = 0, eps = 0 by the root of 0. Rounded to float32, 1e-60 is 0 and 1e39 infinite."""
    adapter = adapter_of(learner)
    grads = adapter.grads = jax.tree.map(jnp.zeros_like, adapter.tree)
    with pytest.raises(ValueError, match=next(iter(settings))):
        learner.step(adapter, Adam(**settings))
    assert adapter.grads is grads


def test_a_step_that_is_not_finite_changes_nothing(learner):
    """With beta2 = 0 the second direction is about 1e10 / 1e-10, times a rate of 1e30."""
    adapter = adapter_of(learner)
    adapter.grads = jax.tree.map(lambda x: jnp.full_like(x, 1e10), adapter.tree)
    learner.step(adapter, Adam(0.0))
    before, moments = adapter.tree, adapter.moments
    adapter.grads = jax.tree.map(lambda x: jnp.full_like(x, 1e-10), adapter.tree)
    with pytest.raises(ValueError, match="weights or moments that are not finite"):
        learner.step(adapter, Adam(1e30, beta2=0.0))
    assert adapter.tree is before and adapter.moments is moments and adapter.grads is None


def test_what_an_adapter_trains_follows_from_its_shape(learner):
    assert set(learner.create(LoraShape(2, mlp=False), 0).tree) == {"q", "k", "v", "o"}
    assert set(learner.create(LoraShape(2, attention=False), 0).tree) == {"gate", "up", "down"}
    with pytest.raises(ValueError, match="set train_attn or train_mlp"):
        learner.create(LoraShape(2, False, False), 0)
    one, same, other = (learner.create(LoraShape(2), seed).tree["q"]["a"] for seed in (1, 1, 2))
    assert (one == same).all() and not (one == other).all()


def test_an_adapter_filled_up_with_zeros_has_the_same_product(learner):
    adapter = adapter_of(learner, LoraShape(3, mlp=False))
    padded = learner.padded(adapter.tree, 5)
    assert {x["a"].shape[-1] for x in padded.values()} == {5} and set(padded) > set(adapter.tree)
    expected, result = lora.merge(params(), adapter.tree), lora.merge(params(), padded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), result, expected)


def test_rows_are_few_and_hold_every_example_once():
    """Each example has a slot more, which holds its last target."""
    examples, seen = data("ppo"), []
    for one in micro_batches(examples, 64):
        rows, flat = one.packed.rows, [x.reshape(-1) for x in one.packed.rows[:4]]
        assert rows.tokens.shape == (2, 32) and one.packed.index.shape in [(d, 1, 32) for d in (1, 2, 4)]
        assert int((rows.end > 0).sum()) == sum(len(examples[i].tokens) + 1 for i in one.numbers)
        for i, index, advantages in zip(one.numbers, one.packed.index[:, 0], one.advantages[:, 0]):
            slots, size = index[index >= 0], len(examples[i].tokens)
            tokens, positions, _, before = (x[slots] for x in flat)
            assert (rows.targets.reshape(-1)[slots] == examples[i].targets).all()
            assert (flat[0][slots // 32 * 32 + before] == examples[i].tokens).all()
            assert (positions == np.minimum(np.arange(1, size + 1), max(LENGTHS) - 1)).all()
            assert tokens[-1] == examples[i].targets[-1]
            assert (advantages[:size] == examples[i].fields["advantages"]).all() and not advantages[size:].any()
        seen += one.numbers
    assert sorted(seen) == [*range(len(examples))]


def test_an_example_may_have_all_positions_of_the_model():
    """Its last target, which no token follows, needs none behind them."""
    scaling = RopeScaling("dynamic", 2.0, original_max_positions=8)
    policy = Policy(Transformer(dataclasses.replace(MODEL.config, rope_scaling=scaling)))
    [one] = micro_batches([Datum(*np.ones((2, 8), np.int32), {"weights": np.ones(8, np.float32)})], 64)
    assert one.packed.rows.positions[0, :9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert accumulate.placed(policy, 1, one.packed)[1].shape == (1, 1, 32)


def of_one(name, p, fields, **given):
    """(loss, losses of tokens) of one example by the name of a loss with these settings."""
    objective, state = summed(name, given)
    rollouts, advantages = view_of([{key: np.asarray(values) for key, values in fields.items()}], (1, 1, len(p)))
    rollouts = rollouts.replace(loss_weights=objective.weights(rollouts))
    total, (metrics, _) = loss_terms(objective, p[None, None], jnp.zeros((1, 1, len(p))), rollouts, advantages, state)
    return total, metrics["losses"][0, 0]


@pytest.mark.slow
def test_fields_are_not_read_where_the_weight_is_zero():
    p, nan = jnp.array([-1.0, -2.0]), np.array([-1.2, np.nan])
    for name in available():
        fields = {key: nan for key in loss_of(name).fields} | {"weights": [1, 0]}
        value, grad = jax.value_and_grad(lambda p, name=name, fields=fields: of_one(name, p, fields)[0])(p)
        assert np.isfinite(value) and np.isfinite(grad).all() and grad[1] == 0, name


def test_settings_move_the_clip():
    fields = {"weights": np.ones(1), "logprobs": np.full(1, -3.0), "advantages": np.ones(1)}
    def loss(name, **given):
        return float(of_one(name, jnp.array([-1.0]), fields, **given)[0])
    assert loss("ppo") == pytest.approx(-1.2) and loss("ppo", clip_high_threshold=5.0) == pytest.approx(-5.0)
    assert loss("ppo", clip_high_threshold=9.0) == pytest.approx(-np.exp(2))
    assert loss("cispo") == pytest.approx(4.0) and loss("cispo", clip_high_threshold=2.0) == pytest.approx(2.0)
    assert loss("ppo_clip", clip_high=4.0) == pytest.approx(-5.0)  # a number of the objective, by its own name


def test_the_ratio_of_a_sequence_is_over_its_marked_tokens():
    """p - q = (0.2, 0.4, 5): the mark has two, s = exp(0.3). Tokens (1, 3) have a weight, token 3 no mark and no loss."""
    p, q, advantages = jnp.array([-1.0, -1.0, -1.0]), [-1.2, -1.4, -6.0], [-2.0, -1.0, -1.0]
    fields = {"logprobs": q, "advantages": advantages, "weights": [0.5, 0, 1], "sequence_ratio_mask": [1, 1, 0]}
    total, losses = of_one("gspo", p, fields)
    assert float(total) == pytest.approx(np.exp(0.3), rel=1e-6)  # 0.5 * 2 * s
    np.testing.assert_allclose(losses, [np.exp(0.3), 0, 0], rtol=1e-6)
    sequence, parts = of_one("minpro", p, fields | {"weights": [1, 1, 0]})
    assert float(sequence) == pytest.approx(float(parts.sum()), rel=1e-5) and (parts[:2] != 0).all() and parts[2] == 0


def test_every_objective_is_a_loss_or_refused_for_what_no_example_has():
    refused = {}
    for name in {*objectives.names()} - {*available()}:
        with pytest.raises(ValueError, match=f"loss_fn='{name}'") as raised:
            loss_of(name)
        refused[name] = str(raised.value)
    assert "reads rewards, which no example has" in refused["pacs"] and "compares all examples" in refused["clip_cov"]
    assert {"gspo", "ppo_clip", "icepop", "minpro", "topr"} <= {*available()} and "keeps a state" not in refused["bapo"]
    with pytest.raises(ValueError, match="its formula is not published.*train with loss_fn='importance_sampling'"):
        loss_of("stable_reinforce")


@pytest.mark.parametrize("change, message", [
    (lambda one: one._replace(tokens=one.tokens[:-1]), "target_tokens must have 4 tokens"),
    (lambda one: one._replace(tokens=one.tokens * 0 + 259), "each from 0 to 258"),
    (lambda one: one._replace(fields={**one.fields, "mask": one.fields["weights"]}), "beside target_tokens; ppo reads"),
    (lambda one: one._replace(fields={"weights": one.fields["weights"]}), "ppo reads logprobs, advantages, and may have w"),
    (lambda one: one._replace(fields=one.fields | {"weights": np.ones(3, np.float32)}), "weights has the shape"),
    (lambda one: one._replace(fields=one.fields | {"weights": np.full(5, np.inf, np.float32)}), "give 5 finite numbers"),
    (lambda one: Datum(*np.zeros((2, 65), np.int32), {}), "has 65 tokens; give 1 to 64"),
    (lambda one: Datum(*np.zeros((2, 0), np.int32), {}), "has 0 tokens"),
])
def test_wrong_examples_are_refused_and_leave_no_gradient(learner, change, message):
    adapter, examples = adapter_of(learner), data("ppo")
    with pytest.raises(ValueError, match=message):
        learner.forward_backward(adapter, [examples[1], change(examples[0])], "ppo", {})
    assert adapter.grads is None


def test_wrong_losses_and_settings_are_refused(learner):
    for name, given, message in (("pp0", {}, "Did you mean 'ppo'"), ("ppo", {"clip": 0.1}, "ppo knows clip_low_threshold"),
                                 ("dro", {"beta": "x"}, "give a number"),
                                 ("ppo", {"clip_high_threshold": 0.5}, "clip_high=-0.5; give 0 or more"),
                                 ("reinforce", {"aggregation": "token_mean"}, "knows no settings"),
                                 ("cross_entropy", {"beta": 1}, "no settings")):
        with pytest.raises(ValueError, match=message):
            learner.forward(None, data("cross_entropy"), name, given)
    with pytest.raises(ValueError, match="no examples"):
        learner.forward(None, [], "ppo", {})
