"""Learning from texts: given ones, preferred ones, or the policy's own that were right."""
from jaxrl_llm.methods.base import Method

ROWS = (
    Method(slug="sft", title="Supervised fine-tuning: imitation of demonstrations",
           equation="l = -sum(w log p) / sum(w) over the trained tokens of given texts",
           estimator="reinforce", objective="sft", source="given", defaults={"epochs": 1, "minibatches": 1},
           known_as=("trl SFTTrainer", "skyrl policy_loss_type=cross_entropy", "tinker loss_fn=cross_entropy",
                     "prime-rl type=sft")),
    Method(slug="dpo", title="Direct preference optimisation on pairs of texts", arxiv=("2305.18290",),
           equation="l = -log sigmoid(h), h = beta [(sum log p - sum log p_ref) of the chosen text - the same of the rejected]",
           estimator="reinforce", objective="dpo", source="given", defaults={"epochs": 1, "minibatches": 1},
           known_as=("trl DPOTrainer",)),
    Method(slug="otr", title="One-token rollouts on given texts", arxiv=("2509.26313",),
           equation="l = -mean over 256 samples a ~ softmax(z / 1.3) at each position of R log p(a), R = 1 if a is the text's "
                    "token, else -0.1",
           estimator="reinforce", objective="otr", source="given", defaults={"epochs": 1, "minibatches": 1}),
    Method(slug="rlpt", title="RLPT: the next and the middle segment of plain text as a task", arxiv=("2509.19249",),
           equation="r = 1 if the prediction is how the text goes on; A = z-score in the group; l = PPO, mean over next "
                    "segments + mean over middle ones",
           objective="rlpt", needs=("middle",), defaults={"group_size": 8, "epochs": 1},
           omits="a model that judges whether the prediction means the same; a rule compares words"),
    Method(slug="raft", title="RAFT: rejection sampling, which imitates the shortest right completion of each prompt",
           arxiv=("2304.06767",),
           equation="l = -mean of log p over the shortest right completion of each prompt, of equal texts one",
           estimator="reinforce", objective="sft", filters="right_ones", defaults={"group_size": 4, "epochs": 1}),
)
