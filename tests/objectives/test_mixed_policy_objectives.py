"""Objectives with expert, teacher, retried and replayed data: literal numbers and float64 loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.objectives.kepo import generalised_jsd
from jaxrl_llm.objectives.otr import expected_one_token_loss, one_token_loss, sample_tokens
from jaxrl_llm.objectives.remix import base_share
from jaxrl_llm.objectives.sil import value_loss

close = np.testing.assert_allclose


def run(slug, new, rollouts, advantage, state=None, **hyper):
    """(loss, metrics, gradient) with A given as [P, G] or [P, G, T]; `state` is the number of earlier calls."""
    objective = objectives.of(slug, **hyper)
    advantage = jnp.asarray(advantage)
    if advantage.ndim == 2:
        advantage = jnp.broadcast_to(advantage[..., None], rollouts.mask.shape)
    update = jax.value_and_grad(objective.update, has_aux=True)
    state = objective.init() if state is None else jnp.int32(state)
    (loss, (metrics, after)), gradient = update(jnp.asarray(new), rollouts, advantage, state)
    if jax.tree.leaves(state):
        assert after == state + 1
    return float(loss), metrics, np.asarray(gradient)


def one_group(old, rewards=(0,), mask=None, **fields):
    """Rollouts of one prompt from per-token probabilities `old` [G, T]; other fields are given as arrays."""
    old = np.float32(old)[None]
    rewards = np.float32(rewards if len(rewards) == old.shape[1] else [0] * old.shape[1])[None]
    mask = np.ones(old.shape, bool) if mask is None else np.bool_(mask)[None]
    arrays = dict(mask=mask, valid=np.ones(old.shape[:2], bool), rewards=rewards, old_logprobs=np.log(old), **fields)
    return Rollouts(**jax.tree.map(jnp.asarray, arrays))


def random_batch(seed, P=2, G=4, T=3):
    """(float64 arrays by name) with invalid rollouts, holes in the mask, and log-probs at most 0."""
    rng = np.random.default_rng(seed)
    def lp():
        return -rng.gamma(1.0, size=(P, G, T))
    return dict(new=lp(), old=lp(), behavior=lp(), ref=lp(), teacher=lp(), advantage=rng.normal(size=(P, G)),
                mask=rng.random((P, G, T)) < 0.7, valid=rng.random((P, G)) < 0.8, expert=rng.random((P, G)) < 0.4,
                rewards=rng.integers(0, 2, (P, G)).astype(float), integers=rng.integers(0, 3, (P, G)), rng=rng)


def to_rollouts(b, **extras):
    return Rollouts(mask=jnp.asarray(b["mask"]), valid=jnp.asarray(b["valid"]), rewards=jnp.asarray(b["rewards"]),
                    old_logprobs=jnp.asarray(b["old"]), behavior_logprobs=jnp.asarray(b["behavior"]),
                    ref_logprobs=jnp.asarray(b["ref"]), extras=jax.tree.map(jnp.asarray, extras))


def tokens(b):
    """Indices (p, g, t) that count."""
    return [tuple(i) for i in np.argwhere(b["mask"] & b["valid"][..., None])]


def check(slug, b, rollouts, loss_of, gradient_of=None, **hyper):
    """Compares with `loss_of(new) -> float` and its gradient: given, or by central differences."""
    actual, _, gradient = run(slug, b["new"], rollouts, b["advantage"], **hyper)
    close(actual, loss_of(b["new"]), rtol=1e-8)
    if gradient_of is None:
        expected, h = np.zeros_like(b["new"]), 1e-5
        for i in np.ndindex(*b["new"].shape):
            step = np.zeros_like(b["new"])
            step[i] = h
            expected[i] = (loss_of(b["new"] + step) - loss_of(b["new"] - step)) / (2 * h)
        close(gradient, expected, rtol=1e-6, atol=1e-9)
    else:
        close(gradient, gradient_of(b["new"]), rtol=1e-10, atol=1e-14)


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


# ---- expert traces in the group: LUFFY, RL-PLUS, CHORD

NEW = np.log(np.float32([[[0.5, 0.05], [0.3, 0.4], [0.2, 0.6], [0.5, 0.5]]]))
OLD = [[0.4, 0.1], [0.3, 0.5], [0.2, 0.5], [0.4, 0.5]]
GROUP = one_group(OLD, (1, 0, 0, 1), extras={"expert": np.array([[True, False, False, False]])})
A = np.float32([[0.5, -0.5, -0.5, 0.5]])
OWN = [[0.25, 0.2], [0.25, 0.3], [-0.3125, -0.25]]
ROWS = 4  # the published sum over the padded length is `fixed_length` times the number of rollouts


def test_luffy_worked_example():
    values, _ = advantages.make("luffy").update(GROUP, ())
    close(values[..., 0], A, atol=1e-7)
    loss, metrics, gradient = run("luffy", NEW, GROUP, values, max_len=2)
    close(loss * ROWS, 0.145833, atol=1e-6)
    close(gradient * ROWS, [[[-0.034722, -0.055556], *OWN]], atol=1e-6)
    close(metrics["expert_fraction"], 0.25)
    loss, _, _ = run("luffy", NEW, GROUP, values, aggregation="token_mean", clip_low=0.2, clip_high=0.2)
    close(loss, 0.039583, atol=1e-6)


def test_luffy_expert_tokens_ignore_old_logprobs_and_may_be_a_prefix():
    changed = GROUP.replace(old_logprobs=GROUP.old_logprobs.at[0, 0].add(-0.7))
    close(run("luffy", NEW, changed, A, max_len=2)[0], run("luffy", NEW, GROUP, A, max_len=2)[0], rtol=1e-7)
    prefix = np.zeros((1, 4, 2), bool)
    prefix[0, 0, 0] = True
    loss, _, gradient = run("luffy", NEW, GROUP.replace(extras={"expert": jnp.asarray(prefix)}), A, max_len=2)
    # the second token is the policy's own now: -A rho = -0.25, in place of -A / 3
    close(loss * ROWS, 0.145833 + (0.5 / 3 - 0.25) / 2, atol=1e-6)
    close(gradient[0, 0] * ROWS, [-0.034722, -0.125], atol=1e-6)


@pytest.mark.parametrize("shaping, weight, slope", [
    ("none", [0.5, 0.05], [0.5, 0.05]),
    ("sqrt", [0.707107, 0.223607], [0.353553, 0.111803]),
    ("log", [-0.693147, -2.995732], [1, 1]),
    ("none_plus_log", [0.430685, -0.249573], [0.6, 0.15]),
    ("target", [0.624999, 0.249999], [0.624999, 0.249999])])
def test_luffy_shapings(shaping, weight, slope):
    extras = {**GROUP.extras, "expert_logprobs": jnp.full((1, 4, 2), np.log([0.8, 0.2]), jnp.float32)}
    own, _, _ = run("luffy", NEW[:, 1:], GROUP.replace(**{k: getattr(GROUP, k)[:, 1:] for k in (
        "mask", "valid", "rewards", "old_logprobs")}, extras={"expert": GROUP.extras["expert"][:, 1:]}), A[:, 1:],
        aggregation="fixed_length", max_len=2)
    loss, _, gradient = run("luffy", NEW, GROUP.replace(extras=extras), A, shaping=shaping, off_min=-np.inf, max_len=2)
    close(loss * 4 - own * 3, -0.5 * sum(weight) / 2, atol=2e-6)
    close(gradient[0, 0] * 4, -0.5 * np.array(slope) / 2, atol=1e-6)


def test_luffy_bounds_stop_the_gradient():
    _, _, gradient = run("luffy", NEW, GROUP, A, max_len=2, off_max=0.5)
    close(gradient[0, 0] * ROWS, [0, -0.055556], atol=1e-6)


def test_rl_plus_worked_example():
    loss, _, gradient = run("rl_plus", NEW, GROUP, A, max_len=2)
    close(loss * ROWS, 0.239306, atol=1e-6)
    close(gradient * ROWS, [[[-0.160706, -0.037488], *OWN]], atol=1e-6)


@pytest.mark.parametrize("slug", ["luffy", "rl_plus"])
def test_the_entropy_bonus_counts_the_own_tokens(slug):
    known = GROUP.replace(extras={**GROUP.extras, "current_entropies": jnp.full((1, 4, 2), 0.7, jnp.float32)})
    plain, _, before = run(slug, NEW, GROUP, A, max_len=2)
    loss, _, gradient = run(f"{slug} + entropy(0.1)", NEW, known, A, max_len=2)
    close((loss - plain) * ROWS, -0.1 * 6 * 0.7 / 2, atol=1e-6)
    close(gradient, before, rtol=1e-6)  # the gradient of H is not one of the log-probs of the tokens
    everywhere, _, _ = run(f"{slug} + entropy(0.1, on=all)", NEW, known, A, max_len=2)
    close((everywhere - plain) * ROWS, -0.1 * 8 * 0.7 / 2, atol=1e-6)
    expert, _, _ = run(f"{slug} + entropy(0.1, on=expert)", NEW, known, A, max_len=2)
    close((expert - plain) * ROWS, -0.1 * 2 * 0.7 / 2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["luffy", "rl_plus"])
def test_expert_objectives_against_numpy(slug, double):
    b = random_batch(0)
    rows = sum(any(i[:2] == (p, g) for i in tokens(b)) for p, g in np.ndindex(*b["valid"].shape))

    def each(new):
        loss, gradient = 0.0, np.zeros_like(new)
        for i in tokens(b):
            a, p, old = b["advantage"][i[:2]], np.exp(new[i]), np.exp(b["old"][i])
            if not b["expert"][i[:2]]:
                value = slope = p / old
            elif slug == "luffy":
                value, slope = p / (p + 0.1), 0.1 * p / (p + 0.1) ** 2
            else:
                value = slope = 2 * p / (old + 0.5 * (old + 1)) * (1 - p) ** 0.5
            loss -= a * value / (rows * 7)
            gradient[i] = -a * slope / (rows * 7)
        return loss, gradient

    check(slug, b, to_rollouts(b, expert=b["expert"]), lambda x: each(x)[0], lambda x: each(x)[1], max_len=7)


CHORD = one_group([[0.25, 0.75], [1, 1]], extras={"expert": np.array([[False, True]])})
CHORD_NEW = np.log(np.float32([[[0.3, 0.6], [0.5, 0.9]]]))


def test_chord_worked_example():
    # the ratios 1.2 and 0.8 lie on the bounds themselves, where the gradient jumps: the bounds are moved a little
    loss, metrics, gradient = run("chord", CHORD_NEW, CHORD, [[1.0, 9.0]], state=300, clip_low=0.201, clip_high=0.201)
    close(metrics["mu"], 0.429706, atol=1e-6)
    close(loss, -0.531026, atol=1e-6)
    close(gradient, [[[-0.342177, -0.228118], [-0.053713, -0.019337]]], atol=1e-6)
    close(run("chord", CHORD_NEW, CHORD, [[1.0, 9.0]], state=0)[0], -1.0, rtol=1e-6)


@pytest.mark.parametrize("step, mu", [(0, 0), (100, 0.25), (200, 0.5), (400, 0.26), (600, 0.02), (5000, 0.02)])
def test_chord_schedule(step, mu):
    close(run("chord", CHORD_NEW, CHORD, [[1.0, 0.0]], state=step)[1]["mu"], mu, atol=1e-6)


def test_chord_forms_and_missing_sides():
    constant = dict(warmup=0, decay=1, peak=0.25, valley=0.25)
    plain = run("chord", CHORD_NEW, CHORD, [[0.0, 0.0]], weighting="none", **constant)
    close(plain[0], 0.25 * -np.log([0.5, 0.9]).mean(), rtol=1e-6)
    close(plain[2][0, 1], [-0.125, -0.125], rtol=1e-6)
    cut = run("chord", CHORD_NEW, CHORD, [[0.0, 0.0]], weighting="importance", cutoff=0.8, **constant)
    close(cut[0], 0.25 * -(0.5 * np.log(0.5) + 0.9 * np.log(0.8)) / 2, rtol=1e-6)
    close(cut[2][0, 1], [-0.0625, 0], rtol=1e-6)
    for share, factor in ((False, 0.75), (True, 0.25)):
        alone = CHORD.replace(extras={"expert": jnp.full((1, 2), share)}, old_logprobs=jnp.asarray(CHORD_NEW))
        loss, _, _ = run("chord", CHORD_NEW, alone, [[1.0, 1.0]], weighting="none", **constant)
        # mu is not renormalised: without experts 0.75 * (-1), without own tokens 0.25 * mean of -log p
        close(loss, factor * (-np.log([0.3, 0.6, 0.5, 0.9]).mean() if share else -1), rtol=1e-6)


def test_chord_against_numpy(double):
    b = random_batch(1)
    own = [i for i in tokens(b) if not b["expert"][i[:2]]]
    expert = [i for i in tokens(b) if b["expert"][i[:2]]]
    assert own and expert

    def each(new):
        loss, gradient = 0.0, np.zeros_like(new)
        for i in own:
            a, rho = b["advantage"][i[:2]], np.exp(new[i] - b["old"][i])
            free, clipped = -a * rho, -a * np.clip(rho, 0.8, 1.2)
            loss += 0.7 * max(free, clipped) / len(own)
            gradient[i] = 0.7 * free / len(own) if free >= clipped else 0
        for i in expert:
            p = np.exp(new[i])
            loss -= 0.3 * p * (1 - p) * new[i] / len(expert)
            gradient[i] = -0.3 * p * (1 - p) / len(expert)
        return loss, gradient

    check("chord", b, to_rollouts(b, expert=b["expert"]), lambda x: each(x)[0], lambda x: each(x)[1],
          warmup=0, decay=1, peak=0.3, valley=0.3)


# ---- PACS

PACS = from_lists([[1, 0, 0]], lengths=[[2, 3, 1]], old_logprobs=pad_lists([[[-1, -2], [-1, -1, -1], [-0.5]]]))
PACS_NEW = pad_lists([[[-0.8, -1.9], [-1.2, -1, -1.1], [-0.4]]])


def test_pacs_worked_example():
    loss, metrics, gradient = run("pacs", PACS_NEW, PACS, np.zeros((1, 3)))
    close(loss, 0.561126, atol=1e-6)
    close(gradient, np.where(PACS.mask, np.array([[[-0.313471], [0.129091], [0.184380]]]), 0), atol=1e-6)
    close(metrics["accuracy"], 2 / 3, rtol=1e-6)  # psi = (.4, -.5, .1), labels (1, 0, 0)
    loss, _, gradient = run("pacs", PACS.old_logprobs, PACS, np.zeros((1, 3)))
    close(loss, np.log(2), rtol=1e-6)
    close(gradient, np.where(PACS.mask, np.array([[[-0.375], [0.1875], [0.1875]]]), 0), atol=1e-7)


def test_pacs_equal_labels_give_no_first_step_and_a_lone_rollout_needs_naive():
    assert not np.any(run("pacs", PACS.old_logprobs, PACS.replace(rewards=jnp.ones((1, 3))), np.zeros((1, 3)))[2])
    lone = PACS.replace(valid=jnp.array([[True, False, False]]))
    assert not np.any(run("pacs", PACS_NEW, lone, np.zeros((1, 3)))[2])
    assert np.any(run("pacs", PACS_NEW, lone, np.zeros((1, 3)), centre="naive")[2])


@pytest.mark.slow
@pytest.mark.parametrize("centre, weighting", [
    ("rloo", "balanced"), ("grpo", "balanced"), ("grpo", "only_positive"), ("rloo", "none"),
    ("naive", "only_positive")])
def test_pacs_against_numpy(centre, weighting, double):
    b, beta = random_batch(2), 0.7
    real = tokens(b)
    score = "logprob" if weighting == "none" else "ratio"

    def loss_of(new):
        total, n_all = 0.0, 0
        for p in range(b["valid"].shape[0]):
            members = sorted({i[1] for i in real if i[0] == p})
            own = {g: [t for (q, h, t) in real if (q, h) == (p, g)] for g in members}
            if score == "ratio":
                s = [beta * sum(new[p, g, t] - b["old"][p, g, t] for t in own[g]) for g in members]
            else:
                s = [beta * np.mean([new[p, g, t] for t in own[g]]) for g in members]
            y = [b["rewards"][p, g] for g in members]
            for i in range(len(members)):
                others = s[:i] + s[i + 1:]
                psi = s[i]
                if centre == "rloo":
                    psi -= np.mean(others) if others else s[i]
                elif centre == "grpo":
                    psi = (psi - np.mean(s)) / ((np.std(s, ddof=1) if others else 0) + 1e-6)
                w = {"only_positive": y[i], "none": 1.0}.get(weighting)
                if w is None:
                    w = len(y) / (2 * y.count(y[i])) if len(set(y)) == 2 else 1.0
                total += w * (np.log1p(np.exp(psi)) - y[i] * psi)
            n_all += len(members)
        return total / n_all

    check("pacs", b, to_rollouts(b), loss_of, beta=beta, centre=centre, weighting=weighting, score=score)


# ---- ReMix

@pytest.mark.parametrize("step, share", [(0, 1), (50, 1), (51, 0.9), (60, 0.9), (61, 0.8), (100, 0.5), (200, 0.5)])
def test_remix_share_of_the_base_model(step, share):
    close(base_share(step), share, rtol=1e-6)


@pytest.mark.slow
def test_remix_worked_example():
    new = np.log(np.float32([[[0.5, 0.4]]]))
    rollouts = one_group([[0.4, 0.5]], behavior_logprobs=np.log(np.float32([[[0.25, 0.5]]])),
                         ref_logprobs=np.log(np.float32([[[0.3, 0.5]]])), extras={"current_version": np.array([61])})
    hyper = dict(anchor_coef=0.01, clip_low=0.201)  # at 0.2 the second ratio is on the bound, where the gradient jumps
    loss, metrics, gradient = run("remix", new, rollouts, [[[1.0, -1.0]]], **hyper)
    close(loss, -0.499399, atol=1e-6)
    close(gradient, [[[0.0018, 0.39875]]], atol=1e-6)
    close([metrics["kl"], metrics["kl_previous"], metrics["clip_fraction"]], [0.068841, 0.025, 0.5], atol=1e-5)
    first = rollouts.replace(extras={"current_version": jnp.array([50])})  # all of the KL term is to the base
    close(loss - run("remix", new, first, [[[1.0, -1.0]]], **hyper)[0], 0.01 * 0.2 * (0.025 - 0.068841), atol=1e-6)


def test_remix_against_numpy_and_ppo(double):
    b = random_batch(3)
    real = tokens(b)
    def k3(d):
        return np.exp(d) - d - 1

    def loss_of(new):
        total = 0.0
        for i in real:
            a, r, c = b["advantage"][i[:2]], np.exp(new[i] - b["behavior"][i]), np.exp(b["old"][i] - b["behavior"][i])
            total += max(-a * r, -a * np.clip(r, c - 0.1, c + 0.3))
            total += 0.05 * (0.8 * min(k3(b["ref"][i] - new[i]), 10) + 0.2 * min(k3(b["old"][i] - new[i]), 10))
        return total / len(real)

    hyper = dict(clip_low=0.1, clip_high=0.3)
    check("remix(anchor_coef=0.05)", b, to_rollouts(b, current_version=np.array([61, 61])), loss_of, **hyper)
    b["behavior"] = b["old"]
    ppo = run("ppo_clip + kl(0.05)", b["new"], to_rollouts(b), b["advantage"], **hyper)
    first = to_rollouts(b, current_version=np.array([0, 50]))  # share = 1 in the first steps
    fresh = run("remix(anchor_coef=0.05)", b["new"], first, b["advantage"], **hyper)
    close(fresh[0], ppo[0], rtol=1e-12)
    close(fresh[2], ppo[2], rtol=1e-10, atol=1e-14)


# ---- R3L

def test_r3l_worked_example():
    """Two base rollouts and their retries; step ids of the three tokens are 0, tool output, 1."""
    rollouts = one_group(np.full((4, 3), 0.5), (0, 0.5, 1, 0.6), mask=[[True, False, True]] * 4,
                         step_ids=np.tile(np.array([0, -1, 1]), (1, 4, 1)),
                         extras={"retry_step": np.array([[1, 0, 1, 0]])})
    values, _ = advantages.make("r3l").update(rollouts, ())
    close(values[0, :, 0], [-0.525, -0.025, 1, 0.225], atol=1e-6)
    loss, metrics, gradient = run("r3l", np.log(np.full((1, 4, 3), 0.5, np.float32)), rollouts, values)
    close(loss, 0.050542, atol=1e-6)
    share = np.array([[0, 0, 1], [1, 0, 1], [0, 0, 1], [1, 0, 1]]) / 6 / 2
    close(gradient[0], -np.array([[-0.525], [-0.025], [1], [0.225]]) * share, atol=1e-7)
    close(metrics["pivotal_fraction"], 6 / 8)


def test_r3l_against_numpy(double):
    b = random_batch(4)
    steps = b["rng"].integers(0, 3, b["mask"].shape)
    real = [i for i in tokens(b) if steps[i] >= b["integers"][i[:2]]]

    def loss_of(new):
        terms = [-b["advantage"][i[:2]] * new[i] / 1.5 + 0.1 * (b["ref"][i] - new[i]) ** 2 / 2 for i in real]
        return np.mean(terms)

    rollouts = to_rollouts(b, retry_step=b["integers"]).replace(step_ids=jnp.asarray(steps))
    check("r3l + kl(0.1, estimator=k2)", b, rollouts, loss_of, tau=0.5)


# ---- KEPO

TEACHER = np.float32([[1, 0, -1], [2, 0, 0]])


def test_kepo_worked_example():
    rollouts = one_group([[0.5], [0.5]], (2, 0), ref_logprobs=np.log(np.float32([[[0.4], [0.3]]])))
    new = np.log(np.full((1, 2, 1), 1 / 3, np.float32))
    values, _ = advantages.grpo(eps=1e-4).update(rollouts, ())
    close(values[0, :, 0], [0.707057, -0.707057], atol=1e-6)
    rl, _, gradient = run("kepo(gate=None) + kl(0.04)", new, rollouts, values)
    close(rl, 0.000461, atol=1e-6)
    close(gradient[0, :, 0], [-0.357528, 0.355528], atol=1e-6)
    logits = (np.zeros((1, 2, 1, 3), np.float32), TEACHER[None, :, None])
    exact = generalised_jsd(*logits)[rollouts.mask & (rollouts.rewards >= 1)[..., None]].mean()
    close(exact, 0.068712, atol=1e-6)
    close(rl + exact, 0.069172, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_jsd_by_hand_and_its_estimate_by_enumeration(beta, double):
    student, teacher = np.array([0.2, -0.4, 0.9]), np.array([1.0, 0.0, -1.0])
    S, T = (np.exp(x) / np.exp(x).sum() for x in (student, teacher))
    def kl(p, q):
        return np.sum(p * np.log(p / q))
    M = (1 - beta) * S + beta * T
    expected = {0.0: kl(T, S), 1.0: kl(S, T)}.get(beta, beta * kl(T, M) + (1 - beta) * kl(S, M))
    def of_student(z):
        return generalised_jsd(z, jnp.asarray(teacher), beta=beta)
    exact, slope = jax.value_and_grad(of_student)(jnp.asarray(student))
    close(exact, expected, rtol=1e-12)

    def estimate(logits):
        """The objective's term, one rollout per token of the vocabulary, weighted by how often it is sampled."""
        logprobs = jax.nn.log_softmax(logits)[None, :, None]
        values = [objectives.make("kepo", jsd_beta=beta).update(logprobs[:, [a]], one, jnp.zeros((1, 1, 1)), ())[0]
                  for a, one in enumerate(sampled)]
        return jnp.stack(values) @ S

    sampled = [Rollouts(mask=jnp.ones((1, 1, 1), bool), valid=jnp.ones((1, 1), bool), rewards=jnp.ones((1, 1)),
                        extras={"teacher_logprobs": jnp.log(jnp.asarray(T[a])).reshape(1, 1, 1)}) for a in range(3)]
    value, gradient = jax.value_and_grad(estimate)(jnp.asarray(student))
    close(value, expected, rtol=1e-10)
    close(gradient, slope, rtol=1e-8, atol=1e-12)


def test_kepo_gate_counts_only_the_tokens_behind_it(double):
    b = random_batch(5)
    real, behind = tokens(b), [i for i in tokens(b) if b["rewards"][i[:2]] >= 1]
    rows = {i[:2] for i in real}

    def each(new):
        loss, gradient = 0.0, np.zeros_like(new)
        for i in real:
            share = 1 / (len(rows) * sum(j[:2] == i[:2] for j in real))
            loss -= b["advantage"][i[:2]] * share
            gradient[i] = -b["advantage"][i[:2]] * share
        for i in behind:
            S, T = np.exp(new[i]), np.exp(b["teacher"][i])
            M = (S + T) / 2
            loss += 2 * (0.5 * T / S * np.log(T / M) + 0.5 * np.log(S / M)) / len(behind)
            gradient[i] += 2 * 0.5 * np.log(S / M) / len(behind)
        return loss, gradient

    rollouts = to_rollouts(b, teacher_logprobs=b["teacher"])
    check("kepo", b, rollouts, lambda x: each(x)[0], lambda x: each(x)[1], kd_coef=2.0)


# ---- OAPL

@pytest.mark.parametrize("beta2, expected, slope", [
    (1e-3, 0.264240, [-0.000190, 0.000310, 0.000310, -0.000190]),
    (1.0, 0.221325, [-0.078371, 0.421629, -0.036516, -0.189943])])
def test_oapl_worked_example(beta2, expected, slope):
    rollouts = one_group([[0.9]] * 4, (1, 0, 0, 1), behavior_logprobs=np.full((1, 4, 1), np.log(0.4), np.float32))
    values, _ = advantages.make("karl_oapl").update(rollouts, ())
    close(values[0, :, 0], [0.379885, -0.620115, -0.620115, 0.379885], atol=1e-6)
    new = np.log(np.float32([[[0.5], [0.5], [0.2], [0.4]]]))
    loss, _, gradient = run("karl_oapl", new, rollouts, values, beta2=beta2)
    close(loss, expected, atol=1e-6)
    close(gradient[0, :, 0], slope, atol=1e-6)


def test_oapl_against_numpy(double):
    b = random_batch(6)
    real = tokens(b)
    rows = sorted({i[:2] for i in real})

    def loss_of(new):
        total = 0.0
        for row in rows:
            drift = sum(new[i] - b["behavior"][i] for i in real if i[:2] == row)
            total += (0.3 * drift - b["advantage"][row]) ** 2
        return total / len(rows)

    check("karl_oapl", b, to_rollouts(b), loss_of, beta2=0.3)


# ---- one-token rollouts

def test_otr_worked_example():
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    where = (jnp.array([[0]]), jnp.array([[True]]))
    loss, gradient = jax.value_and_grad(one_token_loss)(logits, *where, jnp.array([[[0, 0, 1, 2]]]))
    close(loss, 0.276238, atol=1e-6)
    close(gradient[0, 0], [-0.275, 0.16, 0.115], atol=1e-6)
    close(jax.grad(expected_one_token_loss)(logits, *where)[0, 0], [-0.257444, 0.153246, 0.104199], atol=1e-6)


def test_otr_samples_follow_the_heated_distribution():
    logits = np.float32(np.random.default_rng(0).normal(size=(2, 3, 4)))
    drawn = np.asarray(sample_tokens(jax.random.key(0), jnp.asarray(logits), samples=20_000, temperature=2.0))
    assert drawn.shape == (2, 3, 20_000)
    heated = np.exp(logits / 2) / np.exp(logits / 2).sum(-1, keepdims=True)
    close((drawn[..., None] == np.arange(4)).mean(-2), heated, atol=0.015)  # four standard errors
    targets, mask = jnp.zeros((2, 3), jnp.int32), jnp.array([[True, True, False], [True, False, False]])
    sampled = one_token_loss(jnp.asarray(logits), targets, mask, jnp.asarray(drawn))
    close(sampled, expected_one_token_loss(jnp.asarray(logits), targets, mask, temperature=2.0), atol=0.02)


def test_otr_is_the_plain_policy_gradient_on_samples_per_position():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(1, 3, 5)), jnp.float32)
    targets, drawn = rng.integers(0, 5, (1, 3)), jnp.asarray(rng.integers(0, 5, (1, 3, 4)))
    samples = drawn.transpose(0, 2, 1)  # [P, G, T]
    rollouts = Rollouts(mask=jnp.ones((1, 4, 3), bool), valid=jnp.ones((1, 4), bool), tokens=samples,
                        extras={"targets": jnp.asarray(targets)[:, None]})
    values, _ = advantages.make("otr").update(rollouts, ())
    np.testing.assert_array_equal(values, np.where(samples == targets[:, None], np.float32(1), np.float32(-0.1)))

    def composed(logits):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn, axis=-1)
        return objectives.make("otr").update(logprobs.transpose(0, 2, 1), rollouts, values, ())[0]

    def direct(x):
        return one_token_loss(x, jnp.asarray(targets), jnp.ones((1, 3), bool), drawn)
    for a, b in zip(jax.value_and_grad(composed)(logits), jax.value_and_grad(direct)(logits)):
        close(a, b, rtol=1e-5, atol=1e-7)


# ---- self-imitation

RETURNS, VALUES, WEIGHTS = (np.float32(x).reshape(1, 3, 1) for x in ([1, 0.2, 2], [0.4, 0.5, 0.3], [1, 1, 0.5]))


def test_sil_worked_example():
    extras = {"returns": RETURNS, "values": VALUES, "replay_weights": WEIGHTS}
    rollouts = one_group(np.ones((3, 1)), extras=extras)
    values, _ = advantages.make("sil").update(rollouts, ())
    close(values[0, :, 0], [0.6, 0, 1], atol=1e-6)
    policy, _, gradient = run("sil", np.float32([[[-1], [-2], [-7]]]), rollouts, values, min_count=2)
    close(policy, 1.55, atol=1e-6)
    close(gradient[0, :, 0], [-0.3, 0, -0.25], atol=1e-6)  # the third beyond the bound of 5: its gradient passes
    arrays = map(jnp.asarray, (VALUES, RETURNS, WEIGHTS))
    critic, slope = jax.value_and_grad(value_loss)(*arrays, rollouts.mask, min_count=2)
    close(critic, -0.000975, atol=1e-8)
    close(slope[0, :, 0], [-0.0015, 0, -0.00125], atol=1e-8)
    close(policy - 0.01 * (0.5 + 0.5 * 0.5) / 2 + critic, 1.545275, atol=1e-6)
    none = rollouts.replace(extras=extras | {"values": RETURNS + 1})
    assert run("sil", np.float32([[[-1], [-2], [-7]]]), none, advantages.make("sil").update(none, ())[0])[0] == 0


def test_sil_against_numpy(double):
    b = random_batch(7, P=3, T=5)
    returns, values, weights = (b["rng"].uniform(0, 1.5, b["mask"].shape) for _ in range(3))
    count = sum(returns[i] > values[i] for i in tokens(b))
    assert count > 3
    b["advantage"] = np.clip(returns - values, 0, 1)

    def each(new):
        loss, gradient = 0.0, np.zeros_like(new)
        for i in tokens(b):
            share = weights[i] * b["advantage"][i] / count
            loss += share * min(-new[i], 0.5)
            gradient[i] = -share
        return loss, gradient

    rollouts = to_rollouts(b, returns=returns, values=values, replay_weights=weights)
    check("sil", b, rollouts, lambda x: each(x)[0], lambda x: each(x)[1], min_count=3, max_nlp=0.5)


UNCUT = {"fraction": 0.0, "clip_high": 0.2, "aggregation": "token_mean"}  # of the row `spear`
SPEAR = one_group([[0.5]] * 3, (1, 1, 0), extras={"age": np.array([[5, 20, 1]]), "reward_baseline": np.float32([0.4])})


def spear_at(step, new, rollouts=SPEAR, **hyper):
    """The update of that step of a run, with its own advantages."""
    values, _ = advantages.make("spear").update(rollouts, ())
    stamps = {"current_version": np.full(len(rollouts.valid), step, np.int32)}
    return run("spear_clip", new, rollouts.replace(extras=rollouts.extras | stamps), values, **UNCUT | hyper)


def test_spear_worked_example():
    values, _ = advantages.make("spear").update(SPEAR, ())
    close(values[0, :, 0], [0.6, 0.6, -0.4], atol=1e-6)
    new = np.full((1, 3, 1), np.log(0.6), np.float32)
    loss, metrics, _ = spear_at(100, new)
    close(loss, -0.36, atol=1e-6)  # the ratio 1.2 is on the bound itself, where the gradient jumps
    close(metrics["kept_fraction"], 1 / 3, rtol=1e-6)
    inside = spear_at(100, new, clip_high=0.3)
    close([inside[0], *inside[2][0, :, 0]], [-0.36, -0.36, 0, 0], atol=1e-6)
    for step, coef in ((0, 0), (50, 0.1464466), (150, 0.8535534), (999, 1)):
        close(spear_at(step, new)[0], -0.72 * coef, atol=1e-6)
    assert spear_at(200, new, max_age=4)[0] == 0


def test_a_reward_equal_to_the_baseline_still_counts():
    """It has advantage 0 and no gradient, but its token is one of two in the mean."""
    rollouts = SPEAR.replace(extras={"age": np.array([[5, 20, 1]]), "reward_baseline": np.float32([0.0])})
    loss, metrics, _ = spear_at(200, np.full((1, 3, 1), np.log(0.6), np.float32), rollouts)
    close([loss, metrics["kept_fraction"]], [-1.2 / 2, 2 / 3], atol=1e-6)


def test_spear_is_ppo_on_what_is_kept(double):
    b = random_batch(8)
    age, base = b["rng"].integers(0, 20, b["valid"].shape), b["rng"].choice([0.3, 1.0], len(b["valid"]))
    kept = b["valid"] & (age <= 10) & (b["rewards"] >= base[:, None])
    assert 0 < kept.sum() < b["valid"].sum()
    rollouts = to_rollouts(b, age=age, reward_baseline=base, current_version=np.full(len(base), 300))
    loss, _, gradient = run("spear_clip", b["new"], rollouts, b["advantage"], coef=0.5, **UNCUT)
    ppo = run("ppo_clip", b["new"], rollouts.replace(valid=jnp.asarray(kept)), b["advantage"])
    close(loss, 0.5 * ppo[0], rtol=1e-12)
    close(gradient, 0.5 * ppo[2], rtol=1e-12, atol=1e-15)


def test_impossible_settings_are_refused():
    for slug, hyper, message in (
        ("luffy", {}, "generation budget"), ("luffy", {"shaping": "ratio", "max_len": 1}, "Did you mean 'rational'"),
        ("rl_plus", {"variant": "mix", "max_len": 1}, "Did you mean 'mis'"), ("pacs", {"centre": "loo"}, "'rloo'"),
        ("chord", {"weighting": "phy"}, "'phi'"), ("kepo", {"jsd_beta": 2.0}, "lie in"),
    ):
        with pytest.raises(ValueError, match=message):
            objectives.make(slug, **hyper)
    with pytest.raises(ValueError, match="extras\\['expert'\\]"):
        run("luffy", NEW, GROUP.replace(extras={}), A, max_len=2)
