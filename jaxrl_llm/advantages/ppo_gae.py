"""Advantages from learned token values: GAE (arXiv 1506.02438), with VC-PPO's and VAPO's choices of lambda."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.data.rollouts import Rollouts, clean
from jaxrl_llm.maths import masked


def gae(token_rewards_PGT: Array, values_PGT: Array, mask_PGT: Array, *, gamma: float, lam: float | Array) -> Array:
    """`A_t = delta_t + gamma lam A_{t+1}`, `delta_t = rew_t + gamma V_{t+1} - V_t`, over the True entries of each row.

    `V_t` is the value of the state before token t, 0 after the last one; t + 1 means the next True entry, so that
    neither padding nor tool output enters. `lam` is one number or f32[P, G]. Returns f32[P, G, T], 0 outside the mask.
    """
    lam = jnp.broadcast_to(jnp.asarray(lam, values_PGT.dtype), mask_PGT.shape[:-1])

    def step(later, inputs):
        advantage, value = later
        reward, here, real = inputs
        estimate = reward + gamma * value - here + gamma * lam * advantage
        later = jnp.where(real, estimate, advantage), jnp.where(real, here, value)
        return later, jnp.where(real, estimate, 0)

    time_major = [jnp.moveaxis(x, -1, 0) for x in (token_rewards_PGT, values_PGT, mask_PGT)]
    nothing = jnp.zeros_like(lam)
    _, advantages = lax.scan(step, (nothing, nothing), tuple(time_major), reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def token_rewards(rollouts: Rollouts, kl_coef: float = 0.0) -> Array:
    """f32[P, G, T]: the reward on the last trained token, minus `kl_coef * (old_logprobs - ref_logprobs)` on each."""
    rewards = jnp.where(masked.last_token(rollouts.token_mask), rollouts.rewards[..., None], 0)
    return rewards - kl_coef * (rollouts.old_logprobs - rollouts.ref_logprobs) if kl_coef else rewards


def value_targets(rollouts: Rollouts, *, gamma: float = 1.0, lambda_critic: float = 1.0, kl_coef: float = 0.0) -> Array:
    """f32[P, G, T]: the critic's targets, `A_t + V_t` of GAE with a separate lambda (VC-PPO, arXiv 2503.01491).

    With `lambda_critic=1` these are the observed returns, whatever the values are.
    """
    rollouts = lax.stop_gradient(clean(rollouts, *_needs(kl_coef)))
    mask, values = rollouts.token_mask, rollouts.extras["values"]
    advantages = gae(token_rewards(rollouts, kl_coef), values, mask, gamma=gamma, lam=lambda_critic)
    return jnp.where(mask, advantages + values, 0)


def _needs(kl_coef: float) -> tuple[str, ...]:
    return ("rewards", "values", *(("old_logprobs", "ref_logprobs") if kl_coef else ()))


@estimator
def ppo_gae(*, gamma: float = 1.0, lambda_policy: float = 0.95, lambda_critic: float = 1.0, length_alpha: float | None = None,
            kl_coef: float = 0.0, whiten: bool = True, whiten_eps: float = 1e-8) -> Estimator:
    """GAE on `extras["values"]` f32[P, G, T] (see `gae`), then `(A - mean) / sqrt(var + whiten_eps)` over all tokens.

    The variance is the sample variance. `length_alpha` replaces the fixed lambda by `max(0, 1 - 1 / (length_alpha l))`
    for a completion of l tokens (VAPO, arXiv 2504.05118; the floor, which takes effect for short completions, is
    ours). The critic is fitted to `value_targets` with `lambda_critic`, before any whitening.
    The lambdas are VC-PPO's and `whiten_eps` verl's number; PPO has one lambda for both (0.95); VAPO has
    `length_alpha=0.05`, for thousands of tokens.
    """
    if length_alpha is not None and length_alpha <= 0:
        raise ValueError(f"length_alpha={length_alpha} must be positive, or None for the fixed lambda_policy")

    def advantages(rollouts):
        mask, values = rollouts.token_mask, rollouts.extras["values"]
        lam = lambda_policy
        if length_alpha is not None:
            lam = jnp.maximum(1 - 1 / (length_alpha * jnp.maximum(rollouts.lengths, 1).astype(values.dtype)), 0)
        result = gae(token_rewards(rollouts, kl_coef), values, mask, gamma=gamma, lam=lam)
        return masked.whiten(result, mask, eps=whiten_eps, ddof=1) if whiten else result

    def targets(rollouts, monte_carlo):
        return value_targets(rollouts, gamma=gamma, lambda_critic=1.0 if monte_carlo else lambda_critic, kl_coef=kl_coef)

    return stateless(advantages, needs=_needs(kl_coef), value_targets=targets)
