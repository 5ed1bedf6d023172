"""Cases of critics, teachers, steps and shaped rewards."""

import numpy as np
from property_inputs import Case


def extras(**make):
    """Inputs with entries of `extras`, each made by `f(rng, p, g, t)`."""
    return lambda rng, p, g, t: {"extras": {name: f(rng, p, g, t) for name, f in make.items()}}


def per_token(rng, p, g, t):
    return rng.normal(size=(p, g, t)) - 1


def flags(rng, p, g, t):
    return rng.random((p, g)) < 0.4


def ids(rng, p, g, t):
    return rng.integers(0, 2, (p, g))


values = extras(values=per_token)
prm = extras(prm_logprobs=per_token)
distilled = extras(teacher_logprobs=per_token, base_logprobs=per_token)
agents = extras(functional_group=ids, traj=ids)
truncated = extras(truncated=flags)
norms = extras(score_sq_norms=lambda rng, p, g, t: rng.gamma(2.0, size=(p, g)))


def repetitive(rng, p, g, t):
    return {"extras": {"values": per_token(rng, p, g, t)}, "tokens": rng.integers(0, 2, (p, g, t))}


def untrained(rng, p, g, t):
    """A process reward model that still is the policy."""
    same = np.full((p, g, t), -1.0)
    return {"old_logprobs": same, "extras": {"prm_logprobs": same}}


CRITIC = {"equal": "rewards are compared with a critic"}
NEIGHBOURS = CRITIC | {"holes": "a repeated run is one of neighbours in the text: words of others within it part it"}
DISTILLED = {"equal": "advantages are log-ratios to a teacher; rewards are not used"}

ESTIMATORS = {
    "asym_re": [Case(exempt={"equal": "the baseline is a little below the mean on purpose"})],
    "ppo_gae": [
        Case(inputs=values, exempt=CRITIC),
        Case({"gamma": 0.9, "length_alpha": 0.5, "kl_coef": 0.1, "whiten": False}, inputs=values, exempt=CRITIC),
    ],
    "oprl": [
        Case(inputs=prm, equal=untrained),
        Case({"norm": "grpo", "alpha": 0.5}, inputs=prm, equal=untrained),
        Case({"norm": "rloo", "group_stats": "first_step"}, inputs=prm, equal=untrained),
    ],
    "gopd": [
        Case(inputs=distilled, exempt=DISTILLED),
        Case({"teacher_weight": 0.5}, inputs=distilled, exempt=DISTILLED),
    ],
    "exopd": [Case(inputs=extras(
        teacher_logprobs=lambda rng, p, g, t: rng.normal(size=(p, g, t, 3)),
        teacher_id=lambda rng, p, g, t: rng.integers(0, 3, p),
        base_logprobs=per_token,
    ), exempt=DISTILLED)],
    "advevo_baseline": [
        Case(inputs=agents),
        Case({"scope": "batch", "norm_std": True}, inputs=agents),
        Case({"scope": "episode"}, inputs=agents),
    ],
    "adhint_advantage": [
        Case({"power": 0.5}, inputs=extras(hinted=flags, hint_mask=lambda rng, p, g, t: rng.random((p, g, t)) < 0.4))
    ],
    "gui_g1_weights": [Case(inputs=extras(target_weights=lambda rng, p, g, t: rng.uniform(0.5, 1.5, p)))],
    "demystify_cot": [
        Case({"max_len": 8, "margin": 2, "ngram": 2}, inputs=repetitive, exempt=NEIGHBOURS),
        Case({"max_len": 40, "ngram": 3, "penalty": -0.5, "only_start": True, "kl_coef": 0.0}, inputs=repetitive,
             exempt=NEIGHBOURS),
    ],
    "swe_rl_reward": [Case(), Case({"variant": "discrete"})],
    "reinforce_rej": [Case(), Case({"variant": "raw"}), Case({"variant": "raft_pp"})],
    "vcpo": [
        Case(inputs=norms),
        Case({"scope": "batch", "double_weight": True}, inputs=norms),
    ],
}

OBJECTIVES = {
    "gopd": [Case({"sampler_cap": 1.1})],
    "dapo_overlong": [
        Case(inputs=truncated),
        Case({"aggregation": "seq_mean_token_mean", "dual_clip": None}, inputs=truncated),
    ],
    "reinforce_rej": [Case({"drop": True}), Case({"variant": "clip", "drop": True, "aggregation": "prompt_mean"})],
}
