"""Updates of trajectories with the words of others in them: seen, never targets; gradients are those of plain rows."""
import functools

import hole_inputs as inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, recorders
from jaxrl_llm.objectives import make
from jaxrl_llm.rollouts import take
from jaxrl_llm.training import gradient_norms
from jaxrl_llm.training.learner import rows_of
from jaxrl_llm.training.policy import Capture
from jaxrl_llm.training.shapes import quarters_filled
from jaxrl_llm.training.step import in_parts, make_joint_update, make_update
from jaxrl_llm.values import features
from jaxrl_llm.values.critic import Critic
from jaxrl_llm.values.critic import make_update as make_critic_update

P, G, T, D = inputs.P, inputs.G, inputs.T, 32
WATCHED = inputs.Watched(inputs.MODEL, inputs.POLICY.temperature, chunk=24)
SAMPLED = inputs.unrecorded(np.random.default_rng(3))  # `inputs.batch()` computes log-probs, too slow for an import
TRAINED = np.asarray(SAMPLED.token_mask)
MARKER = (int(SAMPLED.tokens[0, 1, 3]),)  # the second trained token of a trajectory that begins with a hint


def cut_down(rollouts, parts=1):
    """The rollouts with the promise that their padding is left out, in so many parts."""
    filled = quarters_filled(np.asarray(rollouts.token_mask), len(rollouts.mask) // parts)
    assert filled < 4
    return rollouts.replace(filled=filled)


def test_the_inputs_have_every_kind_of_hole():
    rollouts = inputs.batch()
    there, last = np.asarray(rollouts.present), TRAINED[..., ::-1].argmax(-1)
    assert np.any(TRAINED[..., 1:] & there[..., :-1] & ~TRAINED[..., :-1])
    assert np.any(there[..., 0] & ~TRAINED[..., 0] & TRAINED.any(-1)) and np.any(there.any(-1) & ~TRAINED.any(-1))
    assert np.any(there[..., ::-1].argmax(-1) < last)  # ends with words of others
    assert {int(role) for role in np.unique(rollouts.role)} == {0, 1, 2, 3, 4}


@functools.cache
def plain_gradient(objective, adapted):
    return inputs.gradient(objective, inputs.adapters() if adapted else None, inputs.batch(), inputs.advantages())


@pytest.mark.slow
@pytest.mark.parametrize("objective, parts, unpads, adapted", (
    pytest.param(inputs.CLIPPED, 1, False, False, id="one pass"),
    pytest.param(inputs.CLIPPED, 4, False, False, id="micro-batches"),
    pytest.param(inputs.CLIPPED, 1, True, False, id="without padding"),
    pytest.param(inputs.CLIPPED, 2, True, False, id="micro-batches without padding"),
    pytest.param(inputs.WHOLE, 2, True, False, id="whole batch"),
    pytest.param(inputs.CLIPPED, 1, False, True, id="adapters"),
    pytest.param(inputs.CLIPPED, 2, True, True, id="adapters in micro-batches")))
def test_an_update_is_that_of_plain_rows(objective, parts, unpads, adapted):
    rollouts = cut_down(inputs.batch(), parts) if unpads else inputs.batch()
    update = make_update(inputs.POLICY, objective, inputs.GRADIENT, clip_norm=None, micro_batches=parts)
    state, metrics = update(inputs.fresh_state(objective, inputs.adapters() if adapted else None), rollouts,
                            inputs.advantages())
    assert all(np.isfinite(x) for x in metrics.values()) and not state.skipped
    assert inputs.distance(state.opt_state.trace, plain_gradient(objective, adapted)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("objective, parts, adapted", (
    (inputs.CLIPPED, 1, False), (inputs.CLIPPED, 2, False), (inputs.WHOLE, 2, False), (inputs.CLIPPED, 1, True)),
    ids=("one pass", "micro-batches", "whole batch", "adapters"))
def test_words_of_others_are_no_targets(objective, parts, adapted):
    """Exactly no gradient goes back through their log-probs."""
    update = make_update(WATCHED, objective, inputs.GRADIENT, micro_batches=parts)
    inputs.SEEN.clear()
    state = inputs.fresh_state(objective, inputs.adapters() if adapted else None)
    jax.block_until_ready(update(state, cut_down(inputs.batch(), parts), inputs.advantages()))
    jax.effects_barrier()
    assert len(inputs.SEEN) == parts and all(cotangent.any() for cotangent, _ in inputs.SEEN)
    assert not any(cotangent[~trained].any() for cotangent, trained in inputs.SEEN)


@pytest.mark.slow
def test_the_loss_by_hand():
    """With `seq_mean_token_mean` a trajectory is divided by the number of its trained tokens, not by its length."""
    rollouts, values = inputs.batch(), inputs.advantages()
    objective = make("ppo_clip", aggregation="seq_mean_token_mean")
    _, metrics = make_update(inputs.POLICY, objective, inputs.GRADIENT)(inputs.fresh_state(objective), rollouts, values)
    new, entropies = map(np.asarray, jax.jit(inputs.logprobs)(inputs.params(), None, rollouts))
    means = []
    for p, g in zip(*np.nonzero(TRAINED.any(-1))):
        own = TRAINED[p, g]
        ratio, a = np.exp(new[p, g][own] - rollouts.old_logprobs[p, g][own]), values[p, g][own]
        means.append(np.maximum(-a * ratio, -a * ratio.clip(0.8, 1.2)).mean())
    assert metrics["loss"] == pytest.approx(np.mean(means), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropies[TRAINED].mean(), rel=1e-5)
    gap = (rollouts.behavior_logprobs - rollouts.old_logprobs)[TRAINED]
    assert metrics["mismatch/kl"] == pytest.approx(gap.mean(), abs=1e-5)
    assert metrics["max/mismatch"] == pytest.approx(np.abs(gap).max(), rel=1e-5)


@pytest.mark.slow
def test_mini_batches():
    order = np.random.default_rng(0).permutation(P)
    update = make_update(inputs.POLICY, inputs.CLIPPED, inputs.GRADIENT, clip_norm=None, micro_batches=2)
    for start in (0, P // 2):
        part, its_advantages = rows_of((cut_down(inputs.batch(), 4), inputs.advantages()), order, start, P // 2)
        state, _ = update(inputs.fresh_state(inputs.CLIPPED), part, its_advantages)
        rows = order[start:start + P // 2]
        plain = jax.tree.map(lambda x: x[rows], (inputs.batch(), inputs.advantages()))
        assert inputs.distance(state.opt_state.trace, inputs.gradient(inputs.CLIPPED, None, *plain)) < 2e-5


@pytest.mark.slow
def test_words_behind_the_last_trained_token_are_not_even_read():
    rollouts = inputs.batch()
    behind = ~(np.flip(np.flip(TRAINED, -1).cumsum(-1), -1) > 0)
    others = rollouts.replace(tokens=np.where(behind, 1, rollouts.tokens))
    assert (others.tokens != rollouts.tokens)[np.asarray(rollouts.present)].any()
    update = make_update(inputs.POLICY, inputs.CLIPPED, inputs.GRADIENT)
    found, again = (update(inputs.fresh_state(inputs.CLIPPED), x, inputs.advantages())[0] for x in (rollouts, others))
    jax.tree.map(np.testing.assert_array_equal, found.opt_state.trace, again.opt_state.trace)


@pytest.mark.slow
def test_words_in_between_are_read():
    """The log-prob of a trained token changes with every word of others before it in its trajectory, and with no other."""
    rollouts = inputs.batch()
    score = jax.jit(lambda r: inputs.POLICY.logprobs(inputs.params(), None, r)[0])
    before = np.asarray(score(cut_down(rollouts)))
    hole = (0, 0, 2)  # of "ppeepp"
    tokens = rollouts.tokens.copy()
    tokens[hole] = (tokens[hole] + 7) % inputs.V
    changed = (np.asarray(score(cut_down(rollouts.replace(tokens=tokens)))) != before) & TRAINED
    assert np.argwhere(changed).tolist() == [[0, 0, 4], [0, 0, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("unpads", (False, True))
def test_logits_of_words_of_others_are_not_computed(unpads):
    """They take no chunk of their own: as many tokens as the chunks of the trained ones hold have log-probs, others have 0."""
    rollouts = cut_down(inputs.batch()) if unpads else inputs.batch()
    logprobs, entropies = map(np.asarray, jax.jit(inputs.POLICY.logprobs)(inputs.params(), None, rollouts))
    chunk, trained = inputs.POLICY.chunk, TRAINED.sum()
    assert trained <= (logprobs != 0).sum() <= -(-trained // chunk) * chunk < np.asarray(rollouts.present).sum()
    assert (entropies[TRAINED] > 0).all() and not entropies[logprobs == 0].any()


def test_recorders_of_log_probs_measure_trained_tokens_as_plain_rows_do():
    """`old`, `reference`, `teacher` and `base` of trajectories with words of others in them."""
    logprobs, rollouts = jax.jit(inputs.POLICY.logprobs), inputs.batch()
    other = jax.tree.map(lambda x: x * 0.9, inputs.params())
    of_policy, of_other = (np.asarray(jax.jit(inputs.logprobs)(tree, None, rollouts)[0]) for tree in (inputs.params(), other))
    for recorder, own, wanted in ((recorders.old(logprobs), None, of_policy),
                                  (recorders.reference(logprobs, False), other, of_other),
                                  (recorders.teacher([logprobs], [other]), (other,), of_other),
                                  (recorders.base_model(logprobs, other), other, of_other)):
        measured = recorder.record(own, inputs.params(), None, rollouts)[recorder.provides[0]]
        np.testing.assert_allclose(np.asarray(measured)[TRAINED], wanted[TRAINED], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_plain_rows():
    """`greedy` reads the words of others, and its log-probs are those of the most likely tokens before each trained one."""
    rollouts, other = inputs.batch(), jax.tree.map(lambda x: x * 0.9, inputs.params())

    def logits(tree):
        own = inputs.MODEL.logits(tree, inputs.states(tree, None, rollouts)[0]) / inputs.POLICY.temperature
        return np.asarray(jax.nn.log_softmax(own))

    mine, theirs = logits(inputs.params()), logits(other)
    recorder = recorders.greedy(jax.jit(inputs.POLICY.likeliest), adapters=False)
    measured = recorder.record(other, inputs.params(), None, rollouts)
    chosen = np.take_along_axis(mine, theirs.argmax(-1)[..., None], axis=-1)[..., 0]
    for name, wanted in (("max_logprobs", mine.max(-1)), ("greedy_logprobs", chosen)):
        np.testing.assert_allclose(np.asarray(measured[name])[TRAINED], wanted[TRAINED], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradient_norms_are_those_of_each_trajectorys_trained_tokens():
    rollouts, measure = inputs.batch(), jax.jit(gradient_norms.make(inputs.POLICY))
    measured = np.asarray(recorders.gradients(measure).record(None, inputs.params(), None, rollouts)["score_sq_norms"])

    @jax.jit
    def gradient_of(p, g):
        def total(tree):
            return jnp.where(jnp.asarray(TRAINED)[p, g], inputs.logprobs(tree, None, rollouts)[0][p, g], 0).sum()
        return sum((x ** 2).sum() for x in jax.tree.leaves(jax.grad(total)(inputs.params())))

    for p, g in ((0, 0), (1, 1), (3, 0), (4, 0), (7, 0)):
        assert measured[p, g] == pytest.approx(float(gradient_of(p, g)), rel=1e-3), (p, g)
    assert measured[2, 0] == 0  # it has only words of others


def plain_features(rollouts, capture):
    """`phi` from plain rows: means over the last trained tokens of the reasoning, entropies of trained tokens only."""
    _, streams = jax.jit(inputs.states)(inputs.params(), None, rollouts)
    _, entropies = map(np.asarray, jax.jit(inputs.logprobs)(inputs.params(), None, rollouts))
    found = np.zeros((P, G, 2 * D + 3), np.float32)
    for p, g in np.ndindex(P, G):
        stream, own = np.asarray(streams[capture.layer, p, g]), np.flatnonzero(TRAINED[p, g])
        marks = [t for t in own if rollouts.tokens[p, g, t] in capture.marker]
        end = marks[-1] if marks else T
        def mean(where):
            return entropies[p, g][where].mean() if len(where) else 0.0
        reasoning, prompt = own[own <= end], np.flatnonzero(rollouts.prompt_mask[p])
        pooled = stream[inputs.S + reasoning][-capture.pool:].mean(0) if len(reasoning) else np.zeros(D)
        found[p, g] = [*stream[prompt][-capture.pool:].mean(0), *pooled, mean(own), mean(own[own < end]), mean(own[own > end])]
    return found


@pytest.mark.slow
def test_features_are_those_of_the_policys_own_words():
    capture = Capture(1, pool=2, marker=MARKER)
    wanted = plain_features(inputs.batch(), capture)
    def capturing(params, lora, r):
        return inputs.POLICY.logprobs_and_features(params, lora, r, capture)
    for rollouts, parts in ((inputs.batch(), 1), (cut_down(inputs.batch()), 1), (cut_down(inputs.batch(), 4), 4)):
        found = jax.jit(in_parts(capturing, parts))(inputs.params(), None, rollouts)[2]
        np.testing.assert_allclose(np.asarray(found)[inputs.batch().valid], wanted[inputs.batch().valid], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_joint_update():
    """The baseline of the first batch is the mean reward of the others; a prompt with one valid rollout teaches nothing."""
    objective = make("reinforce")
    estimator = advantages.make("poise", feature_size=features.feature_size(D), capacity=16)
    rollouts = cut_down(inputs.batch()).replace(old_logprobs=None)
    update = make_joint_update(WATCHED, Capture(1, pool=2), objective, estimator, inputs.GRADIENT, clip_norm=None)
    inputs.SEEN.clear()
    state, metrics = update(inputs.fresh_state(objective, estimator=estimator), rollouts)
    jax.effects_barrier()
    assert all(not cotangent[~trained].any() for cotangent, trained in inputs.SEEN) and len(inputs.SEEN) == 1
    assert not np.asarray(metrics["advantages"])[~TRAINED].any()
    per_rollout = np.where(rollouts.valid.all(1, keepdims=True), rollouts.rewards - rollouts.rewards[:, ::-1], 0)
    by_hand = np.broadcast_to(per_rollout[..., None], (P, G, T))
    np.testing.assert_allclose(np.asarray(metrics["advantages"])[TRAINED], by_hand[TRAINED], rtol=1e-5)
    assert inputs.distance(state.opt_state.trace, inputs.gradient(objective, None, inputs.batch(), by_hand)) < 2e-5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.estimator_state)) if x.dtype == np.float32)


@functools.cache
def critic_of(kind):
    """A critic as if it had been trained: its values are not 0."""
    critic = Critic(inputs.MODEL, inputs.GRADIENT, kind=kind, clip=0.2)
    state = critic.init(inputs.params())
    head = {"weight": jax.random.normal(jax.random.key(1), (D,)) / D**0.5, "bias": jnp.float32(0.3)}
    return critic, state.replace(params=state.params | {"head": head})


def plain_values(params, rollouts):
    trunk = params.get("trunk", inputs.params())
    return inputs.states(trunk, None, rollouts)[0] @ params["head"]["weight"] + params["head"]["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("separate", "head"))
def test_a_critic(kind):
    """Values and gradients of trained tokens are those of plain rows, also behind a hole; nothing is said of holes."""
    critic, state = critic_of(kind)
    state = jax.tree.map(jnp.copy, state)
    policy = inputs.params(), None
    wanted = np.asarray(jax.jit(plain_values)(state.params, inputs.batch()))
    found = np.asarray(critic.values(state.params, policy, cut_down(inputs.batch())))
    np.testing.assert_allclose(found[TRAINED], wanted[TRAINED], rtol=1e-4, atol=1e-5)
    assert not found[~TRAINED].any()

    random = np.random.default_rng(0)
    old, target = (np.where(TRAINED, wanted + random.normal(0, 0.3, TRAINED.shape), np.nan) for _ in range(2))
    rollouts = inputs.batch().replace(extras={"values": old.astype(np.float32), "value_targets": target.astype(np.float32)})

    def loss(params):
        values = plain_values(params, rollouts)[TRAINED]
        near = old[TRAINED] + jnp.clip(values - old[TRAINED], -0.2, 0.2)
        return jnp.maximum((values - target[TRAINED]) ** 2, (near - target[TRAINED]) ** 2).mean() / 2

    wanted_gradient = jax.jit(jax.grad(loss))(state.params)
    for parts in (1, 2):
        after, told = make_critic_update(critic, clip_norm=None, micro_batches=parts)(
            jax.tree.map(jnp.copy, state), policy, cut_down(rollouts, parts))
        assert told["value/loss"] == pytest.approx(float(loss(state.params)), rel=1e-4)
        assert inputs.distance(after.opt_state.trace, wanted_gradient) < 2e-5


def test_parts_of_a_batch_keep_their_roles():
    part = take(inputs.batch(), 2, 3)
    np.testing.assert_array_equal(part.present, np.asarray(inputs.batch().present)[2:5])
