"""TableGPT-R1: every tool call adds a small reward to the reward of the answer (arXiv 2512.20312)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score

NEEDS = ("tool_calls", "tool_errors", "tool_failed", "tool_unknown")


@estimator
def table_gpt_r1(*, progress: float = 0.1, failed: float = -0.1, unknown: float = -0.2, eps: float = 1e-6) -> Estimator:
    """`A = (s - mean) / (sample std + eps)` in the group, `s = r + progress a + failed b + unknown c`.

    a, b, c: the number of a rollout's calls that were answered, that failed in an existing tool, and that named an unknown
    tool. Reads the extras i32[P, G] `tool_calls`, `tool_errors`, `tool_failed` (b) and `tool_unknown` (c); a is
    `tool_calls` minus `tool_errors`. A call that cannot be parsed counts nothing. The numbers come from a description of the
    method; its code is not published.
    """
    def advantages(rollouts):
        calls, errors, b, c = (rollouts.extras[name] for name in NEEDS)
        shaped = rollouts.rewards + progress * (calls - errors) + failed * b + unknown * c
        return group_z_score(shaped, rollouts.valid, eps=eps)

    return stateless(advantages, needs=("rewards", *NEEDS))
