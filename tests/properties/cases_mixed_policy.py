"""Cases of the methods with expert, teacher, retried and replayed data."""

import numpy as np
from property_inputs import Case

from jaxrl_llm.data.rollouts import Role


def expert(rng, p, g, t):
    return {"extras": {"expert": rng.random((p, g)) < 0.3}}


def expert_prefix(rng, p, g, t):
    cut = rng.integers(0, t, (p, g, 1)) * (rng.random((p, g, 1)) < 0.4)
    return {"extras": {"expert": np.arange(t) < cut, "expert_logprobs": -rng.gamma(1.0, size=(p, g, t))}}


def labels(rng, p, g, t):
    return {"rewards": rng.integers(0, 2, (p, g)).astype(float)}


def moved(rng, p, g, t):
    """Some rollouts were written under another text."""
    return {"role": np.where(rng.random((p, g, 1)) < 0.4, Role.ELSEWHERE, Role.POLICY)}


def retries(rng, p, g, t):
    return {"extras": {"retry_step": rng.integers(0, 3, (p, g))}}


def teacher(rng, p, g, t):
    return {"extras": {"teacher_logprobs": -rng.gamma(1.0, size=(p, g, t))}}


def critic(rng, p, g, t):
    named = ("returns", "values", "replay_weights")
    return {"extras": {name: rng.uniform(0, 1.5, size=(p, g, t)) for name in named}}


def stored(rng, p, g, t):
    return {"extras": {"age": rng.integers(0, 16, (p, g)), "reward_baseline": rng.choice([0.2, 0.6], p),
                       "current_version": rng.integers(40, 110, p)}}


def versions(rng, p, g, t):
    return {"extras": {"current_version": rng.integers(40, 110, p)}}


ESTIMATORS = {
    "luffy": [
        Case(inputs=expert),
        Case({"baseline": "on_policy", "use_std": True}, inputs=expert),
        Case({"baseline": "on_policy"}, inputs=expert_prefix),
    ],
    "karl_oapl": [Case(), Case({"beta1": 0.1})],
    "r3l": [Case(), Case({"baseline": "soft", "tau": 0.5})],
    "sil": [Case(inputs=critic, exempt={"equal": "returns are compared with a critic"})],
    "spear": [Case(inputs=stored, exempt={"equal": "rewards are compared with the recent past"})],
}

def hinted(rng, p, g, t):
    """Some rollouts, and a part of others, were written under a hint."""
    known = (rng.random((p, g, 1)) < 0.4) | (rng.random((p, g, t)) < 0.1)
    return {"extras": {"written_logprobs": np.where(known, -rng.gamma(1.0, size=(p, g, t)), np.nan)}}


def replayed(rng, p, g, t):
    return {"extras": {"replayed": rng.random((p, g)) < 0.3}}


OBJECTIVES = {
    "guide_grpo": [
        Case(inputs=hinted),
        Case({"over": "batch", "aggregation": "token_mean"}, inputs=hinted),
        Case({"shaping": "power", "gamma": 0.5}, inputs=hinted),
    ],
    "bepa": [Case(inputs=replayed)],
    "luffy": [
        Case({"max_len": 8}, inputs=expert),
        Case({"shaping": "target", "aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.3},
             inputs=expert_prefix),
        Case({"shaping": "log", "off_min": -np.inf, "aggregation": "token_mean"}, inputs=expert_prefix),
    ],
    "rl_plus": [
        Case({"max_len": 8}, inputs=expert),
        Case({"variant": "target", "aggregation": "token_mean"}, inputs=expert_prefix),
    ],
    "chord": [
        Case({"warmup": 0}, inputs=expert),
        Case({"warmup": 0, "weighting": "importance", "cutoff": 0.5}, inputs=expert_prefix),
    ],
    "ppo_and_moved": [Case(inputs=moved), Case({"moved_coef": 0.5, "clip_high": 0.2})],
    "pacs": [
        Case(inputs=labels),
        Case({"centre": "grpo", "weighting": "only_positive"}, inputs=labels),
        Case({"centre": "naive", "score": "logprob", "weighting": "none"}),
    ],
    "remix": [Case({"anchor_coef": 0.1}, inputs=versions)],
    "dots_rr": [Case()],
    "r3l": [Case(inputs=retries)],
    "karl_oapl": [Case({"beta2": 0.1})],
    "sil": [Case({"min_count": 4, "max_nlp": 0.5}, inputs=critic)],
    "kepo": [
        Case({"gate": 0.5}, inputs=teacher),
        Case({"gate": 0.5, "jsd_beta": 0.0}, inputs=teacher),
        Case({"gate": None}),
    ],
}
