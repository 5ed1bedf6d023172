"""The methods that all others are compared with."""

from jaxrl_llm.methods.base import Method

ROWS = (
    Method(
        slug="reinforce",
        title="REINFORCE with a moving-average baseline",
        equation="A = r - ema(r); l = -A log p",
        estimator=("reinforce", {"variant": "ema"}),
        objective=("reinforce", {}),
        defaults={"epochs": 1},
    ),
    Method(
        slug="reinforce_pp",
        title="REINFORCE++",
        arxiv=("2501.03262",),
        equation="A = whiten over all tokens of r",
        estimator=("reinforce", {"variant": "rfpp"}),
    ),
    Method(
        slug="reinforce_pp_baseline",
        title="REINFORCE++ with group baseline",
        arxiv=("2501.03262",),
        equation="A = whiten over all tokens of (r - group mean)",
        estimator=("reinforce", {"variant": "rfpp_baseline"}),
    ),
    Method(
        slug="rloo",
        title="REINFORCE leave-one-out",
        arxiv=("2402.14740",),
        equation="A_i = r_i - mean of the others; l = -A sum_t log p_t",
        estimator=("rloo", {}),
        objective=("reinforce", {"aggregation": "seq_mean_token_sum"}),
        defaults={"epochs": 1},
    ),
    Method(
        slug="grpo",
        title="Group relative policy optimisation",
        arxiv=("2402.03300",),
        equation="A_i = (r_i - group mean) / (group std + eps)",
        objective=("ppo_clip", {"aggregation": "seq_mean_token_mean"}),
    ),
    Method(
        slug="dr_grpo",
        title="GRPO done right",
        arxiv=("2503.20783",),
        equation="A_i = r_i - group mean; loss / (rollouts * generation budget)",
        estimator=("dr_grpo", {}),
        objective=("ppo_clip", {"aggregation": "fixed_length"}),
        defaults={"group_size": 8},
    ),
    Method(
        slug="dapo",
        title="Decoupled clip and dynamic sampling policy optimisation",
        arxiv=("2503.14476",),
        equation="A_i = z-score in the group of r - overlong penalty; clip(rho, 0.8, 1.28); token mean",
        estimator=("dapo", {}),
        objective=("ppo_clip", {"clip_high": 0.28, "dual_clip": 10.0}),
        filters=("dynamic_sampling",),
        defaults={"group_size": 16, "minibatches": 16},
    ),
    Method(
        slug="ppo_clip",
        title="Clipped surrogate on group-centred rewards",
        arxiv=("1707.06347", "1912.09729"),
        equation="l = max(-A rho, -A clip(rho, 1 - e, 1 + e)), at most -A c where A < 0",
        estimator=("dr_grpo", {}),
        objective=("ppo_clip", {"dual_clip": 3.0}),
        defaults={"minibatches": 4},
    ),
)
