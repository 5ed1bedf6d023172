"""Methods that choose which problems come next, and for how many tokens."""
from jaxrl_llm.methods.base import Method

ROWS = (
    Method(slug="vade", title="VADE: Thompson draws of problems that disagree", arxiv=("2511.18902",),
           equation="batch = largest p (1 - p)^2, p ~ Beta(successes + 1, failures + 1), counts that decay; GRPO",
           controllers="vade", defaults={"group_size": 8}),
    Method(
        slug="dots_rr", title="DOTS-RR: problems predicted to be half solved, and half a batch of replay",
        arxiv=("2506.05316",),
        equation="P(i) ~ exp(-|predicted success - 1/2| / tau); l = max(-A r, -A clip(r, c +- c e)), c = p_old / p_behaviour",
        estimator="grpo", objective="dots_rr",
        needs=("behavior_logprobs", "old_logprobs"), controllers="dots_rr", replay="dots_rr",
        defaults={"prompts": 512, "group_size": 8, "minibatches": 8, "temperature": 0.6},
        omits="another model's embeddings; training of the predictor before the run, in which it learns from each measurement; "
              "the reference is measured a step before it is used"),
    Method(slug="kimi_sampling", title="Kimi k1.5's curriculum and prioritised sampling", arxiv=("2501.12599",),
           equation="levels from easy to hard, then P(i) ~ 1 - success rate; online mirror descent",
           estimator="kimi_opmd", objective="kimi_opmd",
           needs=("old_logprobs",), controllers="kimi_sampling",
           defaults={"optimizer_reset": "every batch", "minibatches": 4},
           omits="the length reward by default (estimator='length_weight=0.5'), partial rollouts, clearing the optimiser, "
                 "long2short"),
    Method(
        slug="acereason_curriculum", title="AceReason's stages of length and difficulty", arxiv=("2505.16400", "2506.13284"),
        equation="tokens 1/4, 1/2, 3/4, 1 of the limit by stage; in the last two only problems with <= 6/16 right; GRPO",
        controllers="acereason_curriculum", defaults={"prompts": 128, "group_size": 16, "temperature": 0.6},
        omits="the stages on code, whose groups grow and whose temperature rises; stages that end with their validation curve"),
    Method(slug="rapo_curriculum", title="RAPO with its curriculum of passes", arxiv=("2509.24107",),
           equation="A = z-score * n_groups / n_groups with std > 0; problems with >= 0.9 right leave after a pass",
           estimator="rapo", objective="ppo_clip(aggregation=seq_mean_token_mean)",
           needs=("old_logprobs", "behavior_logprobs", "replayed"), controllers="rapo_curriculum",
           replay="latest_success", defaults={"prompts": 32, "group_size": 5, "temperature": 1.4},
           omits="the reward of the kind of tool call"),
    Method(slug="qwenlong_l1", title="QwenLong-L1: input lengths that grow in phases", arxiv=("2505.17667",),
           equation="phase k: prompts with L_(k-1) < tokens <= L_k, and earlier unsolved ones; GRPO",
           controllers="qwenlong_l1",
           defaults={"prompts": 128, "group_size": 8, "temperature": 0.7, "top_p": 0.95, "minibatches": 4},
           omits="the supervised warm-up, the judge of answers beside the rule"),
    Method(
        slug="siri", title="SIRI: limits of length that fall and rise", arxiv=("2509.25176",),
        equation="tokens(t) = mid + amp cos(2 pi t / 640), from the limit to half of it and back; GRPO, clip(rho, 0.8, 1.28)",
        objective="ppo_clip(clip_high=0.28)",
        controllers="siri", defaults={"prompts": 128, "temperature": 1.0}),
    Method(slug="adhint_schedule", title="ADHint: hints as long as a prompt is hard", arxiv=("2512.13095",),
           equation="hint = first share w of the solution, w = (w_max - w_min) (1 - mean unaided r) + w_min + noise",
           estimator="adhint_advantage",
           needs=("hinted", "hint_mask"), guidance="adhint", defaults={"group_size": 4}),
    Method(slug="gdro_prompt", title="Prompt-GDRO: an adversary over bins of difficulty", arxiv=("2601.19280",),
           equation="A = w_b z-score, w_b ~ 0.99 softmax(0.65 S_b) + 0.01 / B, S_b <- mean of 1 - pass rate",
           estimator="gdro_prompt", objective="ppo_clip(clip_high=0.28, kl_coef=0.001)",
           defaults={"prompts": 512, "group_size": 4, "minibatches": 4},
           omits="the surrogate loss as the adversary's signal, which is zero on fresh rollouts"),
    Method(
        slug="sws", title="SwS: more of the domains in which learning fails", arxiv=("2506.08989",),
        equation="weak: best accuracy < 0.5, slope < 0; domain drawn ~ its share of weak; groups with 1/8 to 7/8 right; GRPO",
        filters="sws", controllers="sws_domains", defaults={"group_size": 8},
        omits="synthetic problems: the domain's own are drawn more often instead; a fresh start of the second run"),
)
