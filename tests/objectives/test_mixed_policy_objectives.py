"""Objectives with teacher, retried and older data: literal numbers and float64 loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixed_batches import check, close, one_group, random_batch, run, to_rollouts, tokens

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts, from_lists, pad_lists
from jaxrl_llm.objectives.kepo import generalised_jsd
from jaxrl_llm.objectives.remix import base_share

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
