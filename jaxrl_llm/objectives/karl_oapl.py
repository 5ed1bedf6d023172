"""OAPL: regress the log-ratio to the generator on the optimal advantage (arXiv 2602.19362; KARL, 2603.05218)."""
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective


@objective
def karl_oapl(*, beta2: float = 1e-3) -> Objective:
    """`mean over rollouts of (beta2 * sum_t (log p - behaviour log p)_t - A)^2`, A one number per rollout.

    The generating policy itself is the anchor: there is no ratio, clipping or reference model, and the generator may lag
    by hundreds of updates. Gradients scale with `beta2`, which an Adam-like optimiser absorbs. Groups with A = 0 still
    pull the log-ratio to 0. Reconstructed from the papers' equations; no code is public. `beta2` is as quoted in notes on
    the papers; in theory it equals `beta1` of the estimator.
    """

    def rollout_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        drift = masked.sum(logprobs - rollouts.behavior_logprobs, mask, axis=-1)
        residual = beta2 * drift - masked.mean(advantages, mask, axis=-1)
        return {"sequence": residual**2}, {"log_ratio": drift}

    return token_objective(rollout_loss, needs=("behavior_logprobs",), unknown="old", shares="sequence")
