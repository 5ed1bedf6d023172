"""Objectives with an expert's tokens: literal numbers and float64 loops in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from mixed_batches import check, close, one_group, random_batch, run, to_rollouts, tokens

from jaxrl_llm import advantages, objectives

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
