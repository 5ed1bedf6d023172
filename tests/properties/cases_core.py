"""Cases of the first inhabitants: every variant and option that changes the arithmetic."""

from property_inputs import Case

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean")

ESTIMATORS = {
    "grpo": [Case(), Case({"singleton": "raw"})],
    "rloo": [Case(), Case({"singleton": "raw"})],
    "dapo": [Case({"max_len": 6, "cache_len": 4})],
    "reinforce": [
        Case(),
        Case({"variant": "batch_mean"}),
        Case({"variant": "ema", "ema_init": 0.4}),
        Case({"variant": "rfpp", "gamma": 0.9, "kl_coef": 0.1}),
        Case({"variant": "rfpp_baseline"}),
    ],
}

OBJECTIVES = {
    "reinforce": [Case({"aggregation": "seq_mean_token_sum"})],
    "ppo_clip": [
        *(Case({"aggregation": name}) for name in AGGREGATIONS),
        Case({"aggregation": "fixed_length", "max_len": 16, "dual_clip": 1.5, "kl_coef": 0.1}),
        Case({"kl_coef": 0.1, "kl_estimator": "k3+"}),
        Case(inputs=lambda rng, p, g, t: {"old_logprobs": None}),
    ],
}
