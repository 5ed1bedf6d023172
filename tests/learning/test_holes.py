"""Updates of trajectories with the words of others in them: seen, never targets; gradients are those of plain rows."""
import functools

import hole_inputs as inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, recorders
from jaxrl_llm.data.rollouts import Role, Rollouts, take
from jaxrl_llm.data.shapes import quarters_filled
from jaxrl_llm.learning import gradient_norms
from jaxrl_llm.learning.learner import rows_of
from jaxrl_llm.learning.policy import Capture
from jaxrl_llm.learning.step import in_parts, jitted, make_joint_update, make_update, mismatch
from jaxrl_llm.objectives import make
from jaxrl_llm.recorders.base import recorded
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.values import features, turn_critic
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
    pytest.param(inputs.CLIPPED, 2, True, True, id="adapters in micro-batches"),
    pytest.param(inputs.WHOLE, 2, True, True, id="adapters, whole batch")))
def test_an_update_is_that_of_plain_rows(objective, parts, unpads, adapted):
    rollouts = cut_down(inputs.batch(), parts) if unpads else inputs.batch()
    update = make_update(inputs.POLICY, objective, inputs.GRADIENT, clip_norm=None, micro_batches=parts)
    state, metrics = update(inputs.fresh_state(objective, inputs.adapters() if adapted else None), rollouts,
                            inputs.advantages())
    assert all(np.isfinite(x) for x in metrics.values()) and not state.skipped
    assert inputs.distance(state.opt_state.trace, plain_gradient(objective, adapted)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("objective, parts, adapted", (
    (inputs.CLIPPED, 1, False), (inputs.CLIPPED, 2, False), (inputs.WHOLE, 2, False), (inputs.CLIPPED, 1, True),
    (inputs.WHOLE, 2, True)), ids=("one pass", "micro-batches", "whole batch", "adapters", "adapters, whole batch"))
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
    drawn = rollouts.role == Role.POLICY  # tokens of an expert have a weight, and no gap
    gap = np.where(drawn, rollouts.behavior_logprobs - rollouts.old_logprobs, 0)[TRAINED]
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


def plain_features(rollouts, capture):
    """`phi` from plain rows: means over the last trained tokens of the reasoning, entropies of trained tokens only."""
    _, streams = jax.jit(inputs.states)(inputs.params(), None, rollouts)
    _, entropies = plain_logprobs()
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


TURN = (TRAINED & ~np.pad(TRAINED, ((0, 0), (0, 0), (1, 0)))[..., :-1]).cumsum(-1) - 1  # number of each trained token's turn
NUMBERS = np.arange(3)  # of turns, one more than any trajectory has
THERE = (NUMBERS <= np.where(TRAINED, TURN, -1).max(-1)[..., None])
CAPTURE = Capture(1, pool=2, marker=MARKER)


@functools.cache
def other():
    """The weights of a model that is not the policy."""
    return jax.tree.map(lambda x: x * 0.9, inputs.params())


@functools.cache
def recorder_of(name):
    """The recorder of a run with the policy of `inputs`, and what it keeps beside the policy, whose values are not 0."""
    logprobs, config = jax.jit(inputs.POLICY.logprobs), default_config()
    config.learner.minibatches = 1
    made = recorders.make(name, recorders.Context(
        asked=frozenset(recorders.RECORDERS[name].provides), config=config, policy=inputs.POLICY,
        estimator=advantages.make("archer"), logprobs=logprobs, jitted=jitted, guarded=lambda name, function, times=1: function,
        optimizer=lambda *rate_and_updates: inputs.GRADIENT, loaded=lambda key: [(logprobs, other())],
        features=jitted(type(inputs.POLICY).logprobs_and_features, inputs.POLICY, capture=CAPTURE),
        square_norms=gradient_norms.make(inputs.POLICY)))
    own = made.given if made.init is None else made.init(other())
    return made, own.replace(params=own.params | {"head": head()}) if name == "critic" else own


@functools.cache
def played():
    """The batch with what is recorded of turns and of a critic; there is nothing to be read of holes."""
    values = np.where(TRAINED, np.random.default_rng(0).normal(size=TRAINED.shape), np.nan).astype(np.float32)
    paid = np.random.default_rng(1).normal(size=THERE.shape) * THERE
    return inputs.batch().replace(step_ids=np.where(TRAINED, TURN, 99), prompt_ids=np.arange(P) + 5, extras={
        "current_version": np.full(P, 3, np.int32),
        "task": np.zeros(P, np.int32), "step": np.where(THERE, NUMBERS, -1), "step_rewards": paid.astype(np.float32),
        "value_targets": values})


@functools.cache
def plain_logprobs(weights=inputs.params):
    return tuple(map(np.asarray, jax.jit(inputs.logprobs)(weights(), None, inputs.batch())))


@functools.cache
def plain_logits(weights):
    logits = inputs.MODEL.logits(weights(), jax.jit(inputs.states)(weights(), None, inputs.batch())[0])
    return np.asarray(jax.nn.log_softmax(logits / inputs.POLICY.temperature))


def plain_likeliest():
    mine, theirs = plain_logits(inputs.params), plain_logits(other)
    chosen = np.take_along_axis(mine, theirs.argmax(-1)[..., None], axis=-1)[..., 0]
    return {"max_logprobs": mine.max(-1), "greedy_logprobs": chosen}


def plain_seeds():
    """Bits of the key of the run's seed, into which version 3, the problem, the rollout and the slot are folded."""
    version = jax.random.fold_in(jax.random.key(default_config().seed), 3)
    bits = jax.jit(lambda *numbers: jax.random.bits(functools.reduce(jax.random.fold_in, numbers, version)))
    return np.array([[[bits(p + 5, g, t) for t in range(T)] for g in range(G)] for p in range(P)])


def plain_pulls():
    """The squared norm of the gradient of each token's log-prob, which JAX takes with respect to the tempered logits."""
    def of_token(logits, token):
        return jnp.square(jax.grad(lambda x: jax.nn.log_softmax(x)[token])(logits)).sum()

    logits, tokens = plain_logits(inputs.params), np.asarray(inputs.batch().tokens)
    return jax.vmap(of_token)(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)).reshape(tokens.shape)


def plain_norms():
    @jax.jit
    def gradient_of(p, g):
        def total(tree):
            return jnp.where(jnp.asarray(TRAINED)[p, g], inputs.logprobs(tree, None, inputs.batch())[0][p, g], 0).sum()
        return sum((x ** 2).sum() for x in jax.tree.leaves(jax.grad(total)(inputs.params())))

    return {"score_sq_norms": np.array([[gradient_of(p, g) for g in range(G)] for p in range(P)])}


def plain_turns(own):
    """A turn is read from the states before its first token and before the slot behind its last one."""
    def longer(x):
        return np.pad(x, ((0, 0), (0, 0), (0, 1)))
    r = inputs.batch()
    wider = r.replace(mask=longer(r.mask), tokens=longer(r.tokens), role=longer(r.role))
    before = np.asarray(jax.jit(inputs.states)(inputs.params(), None, wider)[0])
    states = np.zeros((*THERE.shape, 2, D), np.float32)
    for p, g, k in np.argwhere(THERE):
        slots = np.flatnonzero(TRAINED[p, g] & (TURN[p, g] == k))
        states[p, g, k] = before[p, g, [slots[0], slots[-1] + 1]]
    return {"turn_states": states, **dict(zip(("turn_q", "turn_v"), turn_critic.values(own.params, states)))}


PLAIN = {  # what each recorder has to provide, by plain rows, from what it keeps beside the policy
    "base": lambda own: {"base_logprobs": plain_logprobs(other)[0]},
    "critic": lambda own: {"values": jax.jit(plain_values)(own.params, inputs.batch())},
    "features": lambda own: {**PLAIN["old"](own), "features": plain_features(inputs.batch(), CAPTURE)},
    "gradients": lambda own: plain_norms(),
    "greedy": lambda own: plain_likeliest(),
    "logit_gradients": lambda own: {"logit_gradients": plain_pulls()},
    "old": lambda own: dict(zip(("old_logprobs", "entropies"), plain_logprobs())),
    "reference": lambda own: dict.fromkeys(("ref_logprobs", "base_logprobs"), plain_logprobs(other)[0]),
    "teacher": lambda own: {"teacher_logprobs": plain_logprobs(other)[0][..., None], "teacher_id": np.zeros(P)},
    "token_seeds": lambda own: {"token_seeds": plain_seeds()},
    "turn_critic": plain_turns,
    "written": lambda own: {"written_logprobs": np.full(TRAINED.shape, np.nan)},  # nothing was written under another text
}
OURS = sorted(name for name, kind in recorders.RECORDERS.items() if kind.make.__module__.startswith("jaxrl_llm.")
              and name != "routes")  # of mixtures alone, see tests/integration/test_routing_run.py


def test_every_recorder_is_compared_with_plain_rows():
    assert OURS == sorted(PLAIN)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("old", "reference", "base")))
                                  for name in OURS])
def test_a_recorder_measures_what_plain_rows_have(name):
    """Of trained tokens, of turns, and of rollouts; what a critic learns from it is finite."""
    recorder, own = recorder_of(name)
    measured, wanted = recorder.record(own, inputs.params(), None, played()), PLAIN[name](own)
    assert measured.keys() == wanted.keys() == {*recorder.provides}
    for field, values in wanted.items():
        there = next(real for real in (TRAINED, THERE, inputs.batch().valid, np.ones(P, bool))
                     if real.shape == values.shape[:real.ndim])
        np.testing.assert_allclose(np.asarray(measured[field])[there], np.asarray(values)[there], atol=1e-5,
                                   rtol=1e-3 if name == "gradients" else 1e-4, err_msg=field)
    if name == "gradients":
        assert not measured["score_sq_norms"][~TRAINED.any(-1)].any()  # one has only words of others
    if recorder.fit is not None:
        kept, told = recorder.fit(jax.tree.map(jnp.copy, own), (inputs.params(), None), recorded(played(), measured))
        assert told and all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get((kept, told))))


@pytest.mark.slow
def test_features_are_those_of_the_policys_own_words():
    wanted = plain_features(inputs.batch(), CAPTURE)
    def capturing(params, lora, r):
        return inputs.POLICY.logprobs_and_features(params, lora, r, CAPTURE)
    for rollouts, parts in ((inputs.batch(), 1), (cut_down(inputs.batch()), 1), (cut_down(inputs.batch(), 4), 4)):
        found = jax.jit(in_parts(capturing, parts))(inputs.params(), None, rollouts)[2]
        np.testing.assert_allclose(np.asarray(found)[inputs.batch().valid], wanted[inputs.batch().valid], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", (False, True))
def test_a_joint_update(adapted):
    """The baseline of the first batch is the mean reward of the others; a prompt with one valid rollout teaches nothing."""
    objective = make("reinforce")
    estimator = advantages.make("poise", feature_size=features.feature_size(D), capacity=16)
    rollouts = cut_down(inputs.batch()).replace(old_logprobs=None)
    update = make_joint_update(WATCHED, Capture(1, pool=2), objective, estimator, inputs.GRADIENT, clip_norm=None)
    inputs.SEEN.clear()
    lora = inputs.adapters() if adapted else None
    state, metrics = update(inputs.fresh_state(objective, lora, estimator), rollouts)
    jax.effects_barrier()
    assert all(not cotangent[~trained].any() for cotangent, trained in inputs.SEEN) and len(inputs.SEEN) == 1
    assert not np.asarray(metrics["advantages"])[~TRAINED].any()
    per_rollout = np.where(rollouts.valid.all(1, keepdims=True), rollouts.rewards - rollouts.rewards[:, ::-1], 0)
    by_hand = np.broadcast_to(per_rollout[..., None], (P, G, T))
    np.testing.assert_allclose(np.asarray(metrics["advantages"])[TRAINED], by_hand[TRAINED], rtol=1e-5)
    wanted = inputs.gradient(objective, inputs.adapters() if adapted else None, inputs.batch(), by_hand)
    assert inputs.distance(state.opt_state.trace, wanted) < 2e-5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.estimator_state)) if x.dtype == np.float32)


@functools.cache
def critic_of(kind):
    """A critic as if it had been trained: its values are not 0."""
    critic = Critic(inputs.MODEL, inputs.GRADIENT, kind=kind, clip=0.2)
    state = critic.init(inputs.params())
    return critic, state.replace(params=state.params | {"head": head()})


def head():
    return {"weight": jax.random.normal(jax.random.key(1), (D,)) / D**0.5, "bias": jnp.float32(0.3)}


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


def test_log_probs_that_are_unknown_are_no_mismatch():
    """Of tokens by the policy, one of which nobody measured, and one by an expert: the gap of the first alone."""
    rollouts = Rollouts(mask=jnp.ones((1, 1, 3), bool), valid=jnp.ones((1, 1), bool),
                        role=jnp.array([[[Role.POLICY, Role.POLICY, Role.EXPERT]]]),
                        behavior_logprobs=jnp.array([[[-1, jnp.nan, -9.0]]]), loss_weights={"token": jnp.full((1, 1, 3), 0.5)})
    found = mismatch(rollouts, jnp.full((1, 1, 3), -1.5))
    assert found["mismatch/kl"] == 0.25 and found["max/mismatch"] == 0.5
