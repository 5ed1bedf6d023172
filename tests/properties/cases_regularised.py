"""Cases of the covariance, divergence and off-policy REINFORCE family."""

import numpy as np
from property_inputs import Case

BY_POSITION = {"permutation": "the random draw belongs to positions of the batch"}
BY_SLOT = BY_POSITION | {"holes": "the random draw belongs to slots of the rollout"}
NEIGHBOURS = {"holes": "an n-gram is one of neighbours in the text: words of others within it part it"}


def replay(rng, p, g, t):
    return {"extras": {"reward_baseline": rng.random(p), "age": rng.integers(0, 15, (p, g)),
                       "current_version": rng.integers(40, 110, p)}}


def tasks(rng, p, g, t):
    return {"extras": {"task": rng.integers(0, 2, p)}}


def few_tokens(rng, p, g, t):
    return {"tokens": rng.integers(0, 2, (p, g, t))}


def one_token(rng, p, g, t):
    """Nothing is repeated."""
    return {"tokens": np.tile(np.arange(t), (p, g, 1))}


ORDER = {"permutation": "rollouts are visited in their order until the budget is spent"}

ESTIMATORS = {
    "qwenlong_aepo": [
        Case(inputs=tasks),
        Case({"scope": "batch", "gate": "token", "entropy_high": 1.5}),
        Case({"scope": "batch", "gate": "sequence", "entropy_high": 1.5}),
        Case({"scope": "batch", "entropy_low": 50.0, "entropy_high": 60.0}),
    ],
    "kimi_opmd": [Case(), Case({"baseline": "logavgexp", "tau": 0.5}),
                  Case({"length_weight": 1.0, "length_warmup": 100})],
    "rec_family": [Case(), Case({"scale": True}), Case({"drop": "balance"}, exempt=BY_POSITION)],
    "topr": [Case({"shift": 0.5}, exempt={"equal": "the baseline is a fixed number"})],
    "t1": [
        Case({"threshold": 0.3}, inputs=few_tokens, equal=one_token, exempt=NEIGHBOURS),
        Case({"n": 3}, inputs=few_tokens, equal=one_token, exempt=NEIGHBOURS),
    ],
}

OBJECTIVES = {
    "clip_cov": [Case({"fraction": 0.2, "cov_low": 0.1, "clip_high": 0.3}, exempt=BY_SLOT)],
    "kl_cov": [Case(), Case({"fraction": 0.3})],
    "c3po": [Case({"budget": 40}, exempt=ORDER), Case({"budget": 25, "truncate": False}, exempt=ORDER),
             Case({"budget": 1000})],
    "spear_clip": [
        Case({"max_len": 16, "fraction": 0.3, "cov_low": 0.1, "warmup": 0}, inputs=replay, exempt=BY_SLOT),
        Case({"aggregation": "token_mean"}, inputs=replay, exempt=BY_SLOT),
        Case({"fraction": 0.0, "aggregation": "token_mean", "warmup": 0}, inputs=replay),
    ],
    "aepo_clip": [
        Case(),
        Case({"entropy_scale": 0.0, "dual_clip": 1.1}),
        Case(inputs=lambda rng, p, g, t: {"entropies": np.full((p, g, t), 0.7)}),
    ],
    "kimi_opmd": [
        Case(),
        Case({"variant": "exact"}),
        Case({"variant": "pairwise", "length_normalised": True}),
        Case({"variant": "simple"}),
        Case(inputs=lambda rng, p, g, t: {"old_logprobs": None}),
    ],
    "rec_family": [
        Case(),
        Case({"clip": "two_side", "weight": "importance_sampling"}),
        Case({"clip": "ring", "weight": "advantage", "ring_low": 0.3, "ring_high": 0.3}),
        Case({"clip": "none"}),
    ],
    "topr": [Case(), Case({"level": "token", "aggregation": "token_mean"})],
    "guirlvg_adv_kl": [Case({"reward_kl_coef": 0.1, "max_reward": 0.8})],
}
