"""Cases of the group-relative advantages."""

import numpy as np
from property_inputs import Case

from jaxrl_llm.rewards.call_kinds import COUNTS

TIES = "equal accuracies, answers or penalties are ranked by their place in the batch"


def continuous(rng, p, g, t):
    return {"rewards": rng.normal(size=(p, g))}


def flawed(rng, p, g, t):
    return {"extras": {"flawed": rng.random((p, g)) < 0.5}}


def answers(rng, p, g, t):
    return {"extras": {"answers": rng.integers(-1, 3, (p, g))}}


def one_answer(rng, p, g, t):
    return {"extras": {"answers": np.ones((p, g), int)}}


def task(rng, p, g, t):
    return {"extras": {"task": rng.integers(0, 2, p)}}


def with_nan(rng, p, g, t):
    return {"reward_components": rng.choice([0.0, 0.5, 1.0, float("nan")], (p, g, 3))}


def tool_use(rng, p, g, t):
    calls = rng.integers(0, 4, (p, g))
    return {"rewards": rng.integers(0, 2, (p, g)).astype(float),
            "extras": {"tool_calls": calls, "error_words": rng.integers(0, calls + 1),
                       "answer_blocks": rng.integers(0, 3, (p, g)), "turns": rng.integers(0, 5, (p, g)),
                       "malformed": rng.random((p, g)) < 0.2}}


def kinds_of_calls(rng, p, g, t):
    return {"rewards": rng.integers(0, 2, (p, g)).astype(float),
            "extras": {name: rng.integers(0, 4, (p, g)) for name in COUNTS} | {"malformed": rng.random((p, g)) < 0.3}}


def no_calls(rng, p, g, t):
    return {"extras": dict.fromkeys(COUNTS, np.zeros((p, g), int)) | {"malformed": np.zeros((p, g), bool)}}


def energies(rng, p, g, t):
    return {"extras": {"logit_gradients": rng.uniform(0, 2, (p, g, t))}}


def compared(rng, p, g, t):
    return {"extras": {"greedy_rewards": rng.choice([0.0, 0.5, np.nan], p)}}


def as_greedy(rng, p, g, t):
    return {"extras": {"greedy_rewards": np.full(p, 0.3)}}


SIGNS = {"equal": "the advantage is a sign, compared with nothing"}
ROC = {"train_rollouts": 3, "min_negative": 1, "min_positive": 1}
MSSR = {"permutation_of_state": "outcomes of one prompt are counted one by one, so the last ones weigh most"}
PLACES = {"permutation_of_state": "of two prompts of one place in a batch the last one has it"}
DRAWS = "each place of a batch has its own random numbers"
NOISE = "the random numbers depend on the shape and type of the batch"

ESTIMATORS = {
    "mc_grpo": [Case(), Case({"scale": "std"}), Case({"scale": "none", "compensate": False})],
    "ace": [Case(), Case({"modulation": "relu", "norm": "mean", "shift_clip": 0.3})],
    "gdpo": [
        Case(inputs=with_nan),
        Case({"whiten": "token", "weights": (1.0, 0.5, 2.0)}),
        Case({"whiten": "none", "conditions": ((0, 2, 0.5),)}),
    ],
    "fapo": [
        Case(inputs=flawed),
        Case({"max_len": 6, "penalty": 0.5}, inputs=flawed, exempt={"equal": "lengths are punished after that"}),
    ],
    "xrpo_advantage": [Case(), Case({"baseline": "correct"})],
    "gdro_prompt": [Case({"num_prompts": 16, "window": 5}, exempt=PLACES),
                    Case({"num_prompts": 16, "window": 5, "mode": "paper"}, exempt=PLACES)],
    "mssr": [
        Case({"num_prompts": 16}, exempt=MSSR),
        Case({"num_prompts": 12, "entropy": "sampled", "rho_rule": "monotone"}, exempt=MSSR),
    ],
    "nsr_psr": [
        Case(exempt=SIGNS),
        Case({"variant": "psr"}),  # equal rewards are below 1/2: none is right
        Case({"variant": "nsr"}, exempt=SIGNS),
    ],
    "grpo_lambda": [
        Case({"share": 0.5}, exempt={"permutation": TIES}),
        Case({"variant": "threshold", "threshold": 0.5}),
    ],
    "rapo": [Case(), Case({"max_scale": 1.1}), Case({"steps": True}, inputs=kinds_of_calls, equal=no_calls)],
    "ttrl": [Case({"train_rollouts": 3}, inputs=answers, equal=one_answer, exempt={"permutation": TIES})],
    "ettrl_ear": [
        Case(inputs=answers, equal=one_answer, exempt={"permutation": TIES}),
        Case({"reward": "given", "factor_min": 0.0}),
        Case({"reward": "given", "variant": "clip", "clip": 0.5}),
    ],
    "pass_at_k": [Case({"k": 2}), Case({"k": 2, "sets": "drawn"}, exempt={"permutation": DRAWS}),
                  Case({"k": 2, "sets": "split"}, exempt={"permutation": "neighbours make a set"})],
    "qwenlong_l15_adv": [Case(inputs=task), Case({"scope": "batch"}), Case({"scope": "group", "ddof": 0})],
    "aepo_advantage": [Case(), Case({"scope": "batch"})],
    "d3s": [Case(inputs=continuous), Case({"scope": "group", "tokens_init": 0.5}, inputs=continuous)],
    "rstar2_roc": [
        Case(ROC, inputs=tool_use, exempt={"permutation": TIES}),
        Case({**ROC, "variant": "paper"}, inputs=tool_use,
             exempt={"permutation": NOISE, "padding": NOISE, "float64": NOISE}),
    ],
    "remax": [Case(inputs=compared, equal=as_greedy)],
    "optimal_token_baseline": [
        Case(inputs=energies),
        Case({"alone": "raw"}, inputs=energies, exempt={"equal": "tokens of the longest rollout alone have no baseline"}),
    ],
    "scalerl": [Case(), Case({"variant": "running"})],
}
