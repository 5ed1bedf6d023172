"""Methods whose baseline is a value model learned beside the policy, from states that the policy computes anyway."""
from jaxrl_llm.methods.base import Method

ROWS = (
    Method(slug="poise", title="Policy optimisation with internal-state value estimation", arxiv=("2605.07579",),
           equation="A_i = r_i - mean over j != i of g(phi_j), g a ridge on hidden states and entropies of earlier batches",
           estimator="poise", objective="ppo_clip(clip_high=0.28, dual_clip=10.0)",
           defaults={"group_size": 2, "epochs": 1}),
)
