"""Cases of the first inhabitants: every variant and option that changes the arithmetic."""

from property_inputs import Case

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean")

UNCENTRED = {"equal": "the reward is not centred on that of this batch"}
LENGTH = {"equal": "rewards are equal before the penalty for long answers, not after it"}

ESTIMATORS = {
    "grpo": [Case(), Case({"singleton": "raw"})],
    "rloo": [Case(), Case({"singleton": "raw"})],
    "dapo": [Case({"max_len": 6, "cache_len": 4}, exempt=LENGTH),
             Case({"max_len": 4, "cache_len": 2, "variant": "code"}, exempt=LENGTH)],
    "reinforce": [
        Case(exempt=UNCENTRED),
        Case({"variant": "batch_mean"}),
        Case({"variant": "ema", "ema_init": 0.4}, exempt=UNCENTRED),
        Case({"variant": "rfpp"}),
        Case({"variant": "rfpp", "gamma": 0.9, "kl_coef": 0.1},
             exempt={"equal": "the discount and the KL differ from token to token"}),
        Case({"variant": "rfpp_baseline"}),
    ],
}

OBJECTIVES = {
    "reinforce": [Case({"aggregation": "seq_mean_token_sum"})],
    "ppo_clip": [
        *(Case({"aggregation": name}) for name in AGGREGATIONS),
        Case({"aggregation": "fixed_length", "max_len": 16, "dual_clip": 1.5}),
        Case(inputs=lambda rng, p, g, t: {"old_logprobs": None}),
    ],
}
