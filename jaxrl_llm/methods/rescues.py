"""Learning from problems that the policy does not solve by itself: hints, parts of traces, plans."""
from jaxrl_llm.methods.base import Method

ROWS = (
    Method(
        slug="guide_grpo", title="Guide-GRPO: a group written under a hint in the place of one that failed",
        arxiv=("2506.13923",),
        equation="A = z-score in the kept group; plain tokens PPO; hinted -A rho / (rho + q90 rho), rho = p(y | x) / "
                 "old p(y | x, hint)",
        objective="guide_grpo", topology="guide_grpo", filters="dynamic_sampling",
        defaults={"group_size": 8, "prompts": 128, "minibatches": 2}),
    Method(slug="prefix_rl", title="PrefixRL: problems that begin with a part of a right trace", arxiv=("2601.18795",),
           equation="A = r - mean of the group of its (problem, prefix); l = -A log p on what is written behind the prefix",
           estimator="dr_grpo", objective="reinforce", topology="prefix_rl",
           defaults={"group_size": 8, "epochs": 1, "minibatches": 1}),
    Method(slug="bepa", title="BEPA: a trace that the policy wrote by a plan in a group that failed", arxiv=("2601.05787",),
           equation="A = z-score in the group, the cached success of the problem in one that failed; its tokens -A p / (p + "
                    "0.1), others PPO",
           objective="bepa", topology="bepa", replay="latest_success(place=last)", defaults={"group_size": 8},
           omits="self-rolled traces of all problems before training: a problem gets plans when it first fails"),
)
