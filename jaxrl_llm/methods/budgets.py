"""Methods that spend rollouts unequally, and the baselines that make few rollouts enough."""

from jaxrl_llm.methods.base import Method

ROWS = (
    Method(
        slug="v0_5",
        title="V0.5, a value prior fused with few rollouts",
        arxiv=("2603.10848",),
        equation="A = r - b, b = V + (1 - s2 / (k d^2))_+ d, d = mean - V",
        estimator=("v0_5", {}),
        objective=("ppo_clip", {"clip_high": 0.28}),
        defaults={"group_size": 4},
    ),
    Method(
        slug="v0",
        title="GRPO with rollout budgets from V0",
        arxiv=("2602.03584",),
        equation="max sum_i n_i q_i (1 - q_i^(n_i - 1)), q = 1 - V0(prompt, policy)",
        defaults={"budget": "paper"},
    ),
    Method(
        slug="knapsack_rl",
        title="Knapsack RL",
        arxiv=("2509.25849",),
        equation="max sum_i (1 - p_i^n_i - q_i^n_i) p_i q_i^2, sum_i n_i = total",
        defaults={"group_size": 8, "budget": "knapsack"},
    ),
    Method(
        slug="gvm_raft",
        title="GRPO with variance-minimising allocation",
        arxiv=("2505.02391",),
        equation="n_i ~ g_i / sqrt(p_i + alpha / p_i^(beta - 1))",
        needs=("gradient_norms",),
    ),
    Method(
        slug="reinforce_ada",
        title="Reinforce-Ada",
        arxiv=("2510.04996",),
        equation="sample until 2 right and 2 wrong; A = r - mean of all drawn",
        estimator=("reinforce_ada", {}),
        objective=("ppo_clip", {"clip_high": 0.28, "dual_clip": 10.0}),
        defaults={"group_size": 4},
    ),
)
