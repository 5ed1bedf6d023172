"""TableGPT-R1: every call of a tool adds a small reward of its own to that of the answer (arXiv 2512.20312)."""
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score

NEEDS = ("tool_calls", "tool_errors", "tool_failed", "tool_unknown")


@estimator
def table_gpt_r1(*, progress: float = 0.1, failed: float = -0.1, unknown: float = -0.2, eps: float = 1e-6) -> Estimator:
    """`A = (s - mean) / (sample std + eps)` in the group, `s = r + progress a + failed b + unknown c`.

    a, b, c: calls of a rollout that were answered, that came back with an error from a tool that exists, and of tools that do
    not exist. Reads the extras i32[P, G] `tool_calls`, `tool_errors`, `tool_failed` (b) and `tool_unknown` (c); a is
    `tool_calls` less `tool_errors`. A call that cannot be read counts nothing. The numbers are those of a description of the
    method; its code is not published.
    """
    def advantages(rollouts):
        calls, errors, b, c = (rollouts.extras[name] for name in NEEDS)
        shaped = rollouts.rewards + progress * (calls - errors) + failed * b + unknown * c
        return group_z_score(shaped, rollouts.valid, eps=eps)

    return stateless(advantages, needs=("rewards", *NEEDS))
