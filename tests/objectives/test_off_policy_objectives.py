"""Literal values and gradients of the off-policy objectives on one small example with three policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, methods, objectives
from jaxrl_llm.data.rollouts import from_lists, pad_lists
from jaxrl_llm.objectives.areal_decoupled_ppo import interpolated_logprobs
from jaxrl_llm.objectives.bapo import candidates

# One prompt, two rollouts of 3 and 2 tokens; padded log-probs are log 0 = -inf on purpose.
with np.errstate(divide="ignore"):
    OLD, NEW, BEHAVIOR = (np.log(pad_lists([rows])) for rows in (
        [[0.5, 0.2, 0.8], [0.4, 0.1]], [[0.75, 0.22, 0.4], [0.2, 0.15]], [[0.5, 0.25, 0.32], [0.32, 0.25]]))
ROLLOUTS = from_lists([[1, 0]], lengths=[[3, 2]], old_logprobs=OLD, behavior_logprobs=BEHAVIOR)
# The same with the old policy as the one that sampled.
FRESH = ROLLOUTS.replace(behavior_logprobs=jnp.asarray(OLD))
A = [[1, 1, 1], [-1, -1]]
PPO = {"clip_low": 0.2, "clip_high": 0.28}


def run(slug, advantage=A, rollouts=ROLLOUTS, new=NEW, **hyper):
    objective = objectives.make(slug, **hyper)
    arguments = jnp.asarray(new), rollouts, jnp.asarray(pad_lists([advantage])), objective.init()
    (loss, (metrics, state)), gradient = jax.value_and_grad(objective.update, has_aux=True)(*arguments)
    gradient = np.asarray(gradient)[0]
    assert gradient[1, 2] == 0
    return float(loss), [*gradient[0], *gradient[1, :2]], metrics, state


def expect(slug, loss, gradient, metrics=None, **options):
    value, slope, facts, state = run(slug, **options)
    np.testing.assert_allclose(value, loss, atol=2e-6)
    np.testing.assert_allclose(slope, gradient, atol=1e-6)
    for name, expected in (metrics or {}).items():
        np.testing.assert_allclose(facts[name], expected, atol=1e-6, err_msg=name)
    return state


def test_gspo():
    expect("gspo", 0.0309056, [-0.156315] * 3 + [0, 0], {"clip_fraction": 0.5, "max/ratio": 0.937889})
    expect("gspo", -0.0359317, [-0.156315] * 3 + [0.216506] * 2, {"clip_fraction": 0}, **PPO)


def test_gspo_token_scales_each_gradient_by_its_own_advantage():
    expect("gspo_token", 0.571361659, [-0.156315, -0.078157, 0.156315, 0.216506, 0.433013],
           advantage=[[1, 0.5, -1], [-1, -2]], **PPO)


@pytest.mark.parametrize("hyper", [{}, PPO])
def test_gspo_token_with_one_advantage_per_rollout_is_gspo(hyper):
    (loss, gradient, *_), (other, slope, *_) = run("gspo", **hyper), run("gspo_token", **hyper)
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    np.testing.assert_allclose(slope, gradient, rtol=1e-6)


def test_gspo_token_clips_some_tokens_of_a_completion_only():
    """s = 0.9379 and 0.8660 are below 1 - 0.05: clipped where A < 0, free where A > 0."""
    _, gradient, metrics, _ = run("gspo_token", advantage=[[1, 0.5, -1], [-1, 2]], clip_low=0.05)
    np.testing.assert_array_equal(np.equal(gradient, 0), [False, False, True, True, False])
    np.testing.assert_allclose(metrics["clip_fraction"], 0.4, rtol=1e-6)


def test_cispo():
    expect("cispo", -0.148222722, [-0.256, -0.22, -0.1, 0.1, 0.256], {"clip_fraction": 0.4}, max_ratio=1.28)
    expect("cispo", -0.144398821, [0, -0.22, -0.1, 0, 0.3], {"masked_fraction": 0.4}, **PPO)


def test_scalerl_from_rewards_to_gradient():
    values, _ = advantages.make("scalerl").update(ROLLOUTS, ())
    np.testing.assert_allclose(values[0, :, 0], [0.999998, -0.999998], rtol=1e-6)
    advantage = [list(np.asarray(values)[0, 0]), list(np.asarray(values)[0, 1, :2])]
    expect("cispo", 0.153029342, [-0.299999, -0.176, -0.25, 0.125, 0.12], advantage=advantage,
           **methods.get("scalerl").part("objective").numbers)


def test_llamarl():
    policies = [np.log(np.float32([rows])) for rows in (
        [[0.1, 0.5, 0.3], [0.2, 0.2, 0.2]], [[0.8, 0.5, 0.15], [0.1, 0.2, 0.6]])]
    rollouts = from_lists([[1, 0]], lengths=[[3, 2]], behavior_logprobs=policies[0])
    values, _ = advantages.make("dr_grpo").update(rollouts, ())
    options = dict(advantage=[list(values[0, 0]), list(values[0, 1, :2])], rollouts=rollouts, new=policies[1])
    slope = np.array([-1, -0.25, -0.125, 0.125, 0.25])
    hyper = methods.get("llamarl").part("objective").numbers
    expect("cispo", -0.0566122702, slope, **options, **hyper)
    expect("cispo", -0.0226449081, 0.4 * slope, **options, **hyper | {"aggregation": "token_mean"})


def test_minpro():
    expect("minpro", 0.241246965, [-0.3, -0.33, -0.11, 0.1, 0.15],
           {"weight": (1.5 + 1.65 + 0.55 + 0.5 + 0.75) / 5, "max/prefix_ratio": 1.65}, rollouts=FRESH)
    _, gradient, _, _ = run("minpro", rollouts=FRESH, cap=1.0)
    np.testing.assert_allclose(gradient, [-0.2, -0.2, -0.11, 0.1, 0.15], atol=1e-6)
    _, gradient, _, _ = run("minpro", rollouts=FRESH, include_current=False)
    np.testing.assert_allclose(gradient, [-0.2, -0.3, -0.22, 0.2, 0.1], atol=1e-6)  # minima 1, 1.5, 1.1 | 1, 0.5
    _, gradient, _, _ = run("minpro", rollouts=FRESH, embed="ppo_clip")
    np.testing.assert_allclose(gradient, [0, 0, -0.11, 0, 0], atol=1e-6)


def test_minpro_skips_tokens_outside_the_mask():
    rollouts = from_lists([[1]], lengths=[[4]], behavior_logprobs=np.zeros((1, 1, 4), np.float32))
    rollouts = rollouts.replace(mask=jnp.array([[[False, True, False, True]]]))
    _, gradient = jax.value_and_grad(lambda x: objectives.make("minpro").update(x, rollouts, jnp.ones((1, 1, 4)), ())[0])(
        jnp.log(jnp.array([[[0.01, 2.0, 0.01, 3.0]]])))
    np.testing.assert_allclose(gradient, [[[0, -1, 0, -3]]], rtol=1e-6)  # weights 2 and 3 * 2, half each


def test_mhpo():
    expect("mhpo", -0.010435086, [-0.063874, -0.050135, -0.009070, 0.013604, 0.095811])
    _, gradient, metrics, _ = run("mhpo", new=OLD)
    np.testing.assert_allclose(metrics["multiplier"], 0.265062, atol=1e-6)
    np.testing.assert_allclose(metrics["hazard"], 1.327791, atol=1e-6)
    np.testing.assert_allclose(gradient, 0.265062 * np.array([-1 / 6] * 3 + [1 / 4] * 2), atol=1e-6)


BAPO = {"low": (0.6, 0.7, 0.05), "advantage": [[1, 1, 1], [-1.335, -1.335]]}


def test_bapo_search():
    expect("bapo", -0.0026, [0, -0.22, -0.1, 0, 0.4005],
           {"bound_low": 0.7, "bound_high": 1.35, "positive_share": 1.004426 / 2.004426}, **BAPO)
    expect("bapo", -0.0093, [0, -0.22, -0.1, 0, 0.4005],
           {"bound_low": 0.6, "bound_high": 1.25, "positive_share": 0.504112}, order="high_first", **BAPO)


@pytest.mark.parametrize("low, high, balance", [
    (0.6, 1.2, 0.998752), (0.65, 1.2, 0.975525), (0.7, 1.2, 0.953354), (0.7, 1.25, 0.970378), (0.7, 1.3, 0.987402)])
def test_bapo_balance_along_the_search(low, high, balance):
    """A search of one candidate reports its share, balance / (1 + balance)."""
    fixed = {"low": (low, low, 0.05), "high": (high, high, 0.05), "advantage": BAPO["advantage"]}
    _, _, metrics, _ = run("bapo", **fixed)
    np.testing.assert_allclose(metrics["positive_share"], balance / (1 + balance), atol=1e-6)


def test_bapo_ends():
    """At once when there is nothing negative; at the last candidate when the target is out of reach."""
    good = [[1] * 3, [1] * 2]
    for advantage, target, bounds in ((good, 9.0, (0.6, 1.2)), (A, 9.0, (0.8, 2.0)), (A, 0.1, (0.6, 1.2))):
        _, _, metrics, _ = run("bapo", advantage=advantage, target=target)
        np.testing.assert_allclose((metrics["bound_low"], metrics["bound_high"]), bounds, rtol=1e-6)


def test_bapo_counts_gradients():
    """Only 1.5 * 1.335 is left of the negative tokens; of the positive ones 1.1 + 0.5, and all under high > 1.5."""
    _, _, metrics, _ = run("bapo", statistic="gradient", order="high_first", **BAPO)
    np.testing.assert_allclose(metrics["bound_high"], 1.55, rtol=1e-6)
    np.testing.assert_allclose(metrics["positive_share"], 3.1 / (3.1 + 2.0025), rtol=1e-6)


def test_bapo_candidates():
    np.testing.assert_allclose(
        candidates((0.6, 0.72, 0.05), (1.2, 1.3, 0.05), "low_first"),
        [(0.6, 1.2), (0.65, 1.2), (0.7, 1.2), (0.72, 1.2), (0.72, 1.25), (0.72, 1.3)])
    assert len(candidates((0.6, 0.8, 0.05), (1.2, 2.0, 0.05), "high_first")) == 5 + 17 - 1


def test_r2vpo_and_its_multiplier():
    slope = [-0.15, -0.198, -0.15, 0.05, 0.45]
    state = expect("r2vpo", -0.119, slope, {"ratio_variance": 0.202, "multiplier": 0.5}, multiplier=0.5)
    np.testing.assert_allclose(state, 0.5192, rtol=1e-6)
    state = expect("r2vpo", -0.119, slope, multiplier=0.5, dual_rate=0.0)
    assert state == 0.5
    _, _, _, state = run("r2vpo", new=OLD, multiplier=0.0005)
    assert state == 0  # on-policy the multiplier falls, but not below 0
    for most, expected in ((0.51, 0.51), (0.52, 0.5192)):
        np.testing.assert_allclose(run("r2vpo", multiplier=0.5, max_multiplier=most)[3], expected, rtol=1e-6)
    assert objectives.make("r2vpo").whole_batch and not objectives.make("r2vpo", dual_rate=0.0).whole_batch


def test_icepop():
    slope = [0, -0.146667, -0.208333, 0, 0]
    expect("icepop", -0.318333, slope, {"kept_fraction": 0.8}, clip_high=0.28)
    expect("icepop_direct", 0.153029648, [-0.3, -0.176, -0.25, 0.125, 0.12], {"mask_fraction": 0})
    _, gradient, metrics, _ = run("icepop_direct", veto=0.61)
    np.testing.assert_allclose(gradient, [-0.3, -0.176, -0.25, 0, 0], atol=1e-6)
    np.testing.assert_allclose(metrics["mask_fraction"], 0.4, rtol=1e-6)


def test_icepop_with_equal_engines_is_ppo():
    plain = run("ppo_clip", aggregation="seq_mean_token_mean", **PPO)
    same = run("icepop", rollouts=FRESH, **PPO)
    np.testing.assert_allclose(same[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(same[1], plain[1], rtol=1e-6)


def test_hispo():
    expect("hispo", -0.0933333, [0, -0.146667, 0, 0, 0], {"kept_fraction": 0.8, "sequence_kept_fraction": 1},
           sequence_gate=0.3, max_len=3)
    expect("hispo", 0, [0] * 5, {"kept_fraction": 0}, max_len=3)
    high = np.where(np.isfinite(NEW), NEW + np.log(8.0), NEW)
    _, gradient, metrics, _ = run("hispo", new=high, sequence_gate=0.3, max_len=3)
    assert metrics["clip_fraction_lower"] == pytest.approx(0.4) and not np.any(gradient)


def test_areal():
    slope = np.array([0, -0.176, 0, 0, 0.12])
    expect("areal_decoupled_ppo", -0.112, slope, {"mask_fraction": 0.2}, max_ratio=2.0, clip_high=0.28)
    slope[2] = -0.2
    expect("areal_decoupled_ppo", -0.312, slope, bound="clip", max_ratio=2.0, clip_high=0.28)
    slope[2] = -0.25
    expect("areal_decoupled_ppo", (-1.28 - 0.88 - 1.25 + 1 + 0.6) / 5, slope, bound=None, clip_high=0.28)
    # geometric means 1.259921 and 0.707107; the first is above the bound
    expect("areal_decoupled_ppo", 0.707107 * (0.8 + 1.5) / 5, [0, 0, 0, 0, 0.707107 * 0.3], {"mask_fraction": 0.6},
           level="sequence", max_ratio=1.25, clip_high=0.28)
    # the dual bound acts before the weight
    expect("areal_decoupled_ppo", (-1.28 - 0.88 - 1.25 + 1 + 0.4 * 1.4) / 5, [0, -0.176, -0.25, 0, 0], dual_clip=1.4,
           clip_high=0.28)


def test_areal_interpolates_the_proximal_policy_by_age():
    new, behavior = jnp.full((1, 1, 5), -1.0), jnp.full((1, 1, 5), -3.0)
    values = interpolated_logprobs(new, behavior, jnp.array([[[1, 3, 4, 5, 6]]]), jnp.array([[[5]]]))
    np.testing.assert_allclose(values, [[[-1.5, -2, -3, -3, -3]]])  # ages 4, 2, 1, 0, -1: alpha 3/4, 1/2, 0, 0, 0
    probabilities, tried = jnp.array([[[0.5, 0.4, 0.2, 0.5]]]), jnp.array([[[0.9, 0.3, 0.21, 0.13]]])
    values = interpolated_logprobs(jnp.log(tried), jnp.log(probabilities), jnp.array([[[2, 3, 4, -1]]]), jnp.array([[[4]]]))
    np.testing.assert_allclose(jnp.exp(values), [[[0.67082, 0.4, 0.2, 0.5]]], rtol=1e-5)  # version -1: of no known policy
    rollouts = ROLLOUTS.replace(old_logprobs=None, policy_version=jnp.full((1, 2, 3), 4, jnp.int32),
                                extras={"current_version": jnp.array([5])})
    plain = run("areal_decoupled_ppo", rollouts=ROLLOUTS.replace(old_logprobs=jnp.asarray(BEHAVIOR)))
    np.testing.assert_allclose(run("areal_decoupled_ppo", rollouts=rollouts, proximal="interpolated")[:2][0], plain[0])


def test_vcpo():
    advantage = [[0.050352] * 3, [-1.949648] * 2]
    expect("vcpo", -0.603289398, [-0.013847] * 3 + [0.182779] * 2,
           {"ess_share": 0.716110, "step_scale": 0.8462328, "truncated_fraction": 0}, advantage=advantage)
    _, gradient, metrics, _ = run("vcpo", advantage=advantage, max_ratio=1.0, ess_base=0.5, exponent=1.0)
    np.testing.assert_allclose(gradient, [-0.050352 / 6] * 3 + [0.182779] * 2, atol=1e-6)
    np.testing.assert_allclose([metrics["ess_share"], metrics["step_scale"]], [0.716110, 1], atol=1e-6)
    _, same, metrics, _ = run("vcpo", advantage=advantage, max_ratio=1.0, truncate_ess=True)
    np.testing.assert_allclose(same, gradient, rtol=1e-6)  # weights 1.65 -> 1 and .375
    np.testing.assert_allclose(metrics["ess_share"], 1.375**2 / (2 * (1 + 0.375**2)), rtol=1e-6)


TIS = [
    ({}, -0.312, [0, -0.176, -0.2, 0, 0.12]),
    ({"bound": "mask"}, -0.232, [0, -0.176, 0, 0, 0]),
    ({"reject": "token_k1", "reject_max": 2.0}, -0.386667, [0, -0.293333, 0, 0, 0]),
    ({"reject": "token_k1", "reject_max": 2.0, "denominator": "original"}, -0.232, [0, -0.176, 0, 0, 0]),
    ({"level": "sequence"}, -0.922, [0, -0.44, -0.2, 0, 0.15]),
    ({"max_ratio": 1.0}, -0.252, [0, -0.176, -0.1, 0, 0.12]),
    # 1.259921 and 0.707107 times the surrogate -1.28, -1.1, -0.5 | 0.8, 1.5
    ({"level": "geometric"}, -0.400445, [0, -0.277183, -0.125992, 0, 0.212132]),
    ({"bound": "clip", "min_ratio": 0.9}, (-1.28 - 0.99 - 1 + 1 + 1.35) / 5, [0, -0.198, -0.2, 0, 0.27]),
    ({"bound": "seq_mask", "max_ratio": 1.3}, (-1.28 - 0.88 - 1.25) / 5, [0, -0.176, -0.25, 0, 0]),
    ({"dual_clip": 1.4}, (-1.28 - 0.88 - 1 + 1 + 0.4 * 1.4) / 5, [0, -0.176, -0.2, 0, 0]),
    ({"veto": 0.5}, (-1.28 - 0.88 - 1) / 3, [0, -0.88 / 3, -1 / 3, 0, 0]),
    # token weights 1, .8, 2 | 1.25, .4 have mean 1.09; sequence weights 2 and .5 have mean 1.25 over rollouts
    ({"normalise": True}, -0.312 / 1.09, np.array([0, -0.176, -0.2, 0, 0.12]) / 1.09),
    ({"level": "sequence", "normalise": True}, -0.922 / 1.25, np.array([0, -0.44, -0.2, 0, 0.15]) / 1.25),
]


@pytest.mark.parametrize("hyper, loss, gradient", TIS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_tis_mis(hyper, loss, gradient):
    metrics = {"ess_share": 0.826635} if hyper.get("max_ratio", 2.0) == 2.0 else {}
    expect("tis_mis", loss, gradient, metrics, **PPO | hyper)


# d = old - behaviour = log [1, .8, 2.5 | 1.25, .4]. Per rollout, sum of -d: -log 2, log 2; mean: -0.231049, 0.346574;
# k2 = [0, .024897, .419794 | .024897, .419794]; k3 = [0, .023144, .583709 | .026856, .316291].
REJECTED = [
    ("token_k2", None, 0.4, [1, 1, 0, 1, 0]),
    ("token_k3", None, 0.5, [1, 1, 0, 1, 1]),
    ("token_k1", 0.45, 1.3, [1, 1, 0, 1, 0]),
    ("seq_sum_k1", 0.45, 1.9, [1, 1, 1, 0, 0]),
    ("seq_sum_k2", None, 0.4447, [1, 1, 1, 1, 1]),
    ("seq_sum_k2", None, 0.4446, [0, 0, 0, 0, 0]),
    ("seq_sum_k3", None, 0.5, [0, 0, 0, 1, 1]),
    ("seq_mean_k1", 0.75, 1.4, [1, 1, 1, 0, 0]),
    ("seq_mean_k2", None, 0.15, [1, 1, 1, 0, 0]),
    ("seq_mean_k3", None, 0.19, [0, 0, 0, 1, 1]),
    ("seq_max_k2", None, 0.41, [0, 0, 0, 0, 0]),
    ("seq_max_k3", None, 0.4, [0, 0, 0, 1, 1]),
]


@pytest.mark.parametrize("reject, low, high, kept", REJECTED)
def test_tis_mis_rejections(reject, low, high, kept):
    options = dict(new=OLD, max_ratio=1.0, min_ratio=1.0, bound="clip", reject=reject, reject_min=low, reject_max=high)
    loss, gradient, metrics, _ = run("tis_mis", **options)
    signed = np.array(kept) * [-1, -1, -1, 1, 1]
    np.testing.assert_allclose(metrics["kept_fraction"], np.mean(kept), rtol=1e-6)
    np.testing.assert_allclose(gradient, signed / max(sum(kept), 1), atol=1e-6)
    _, gradient, _, _ = run("tis_mis", denominator="original", **options)
    np.testing.assert_allclose(gradient, signed / 5, atol=1e-6)


def test_impossible_settings_are_refused():
    for slug, hyper, message in (
        ("cispo", {"anchor": "behaviour"}, "Did you mean 'behavior'"),
        ("cispo", {"clip_low": 0.2}, "give both"),
        ("minpro", {"embed": "clip"}, "ppo_clip"),
        ("bapo", {"order": "low"}, "low_first"),
        ("r2vpo", {"multiplier": 0.2, "max_multiplier": 0.1}, "at least multiplier=0.2"),
        ("bapo", {"statistic": "grad"}, "gradient"),
        ("hispo", {}, "generation budget"),
        ("tis_mis", {"reject": "seq_max_k1", "reject_max": 1.0}, "seq_max_k2"),
        ("tis_mis", {"reject": "token_k2"}, "needs reject_max"),
        ("tis_mis", {"bound": "truncated"}, "Did you mean 'truncate'"),
        ("areal_decoupled_ppo", {"bound": "truncate"}, "Allowed: clip, mask"),
    ):
        with pytest.raises(ValueError, match=message):
            objectives.make(slug, **hyper)
    with pytest.raises(ValueError, match="'behavior_logprobs'"):
        run("icepop", rollouts=ROLLOUTS.replace(behavior_logprobs=None))
