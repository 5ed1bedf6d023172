"""Cosine length reward and repetition penalty, each with its own discount (arXiv 2502.03373)."""
import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.data.rollouts import clean
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.ngrams import repeated_starts


def cosine_reward(right: Array, lengths: Array, *, max_len: int, correct: tuple[float, float] = (2.0, 1.0),
                  wrong: tuple[float, float] = (-10.0, 0.0), exceed: float = -10.0, margin: int = 16) -> Array:
    """`long + (short - long) (1 + cos(pi n / max_len)) / 2` for n tokens, `exceed` where `n + margin >= max_len`.

    (short, long), the values at 0 and at `max_len` tokens, are `correct` or `wrong`: with the defaults a longer answer
    is worth less when right and more when wrong. `right` bool, `lengths` int, of one shape.
    """
    share = (1 + jnp.cos(jnp.pi * lengths / max_len)) / 2
    short, long = (jnp.where(right, good, bad) for good, bad in zip(correct, wrong))
    return jnp.where(lengths + margin >= max_len, exceed, long + (short - long) * share)


def repetition(tokens_PGT: Array, mask_PGT: Array, *, size: int, only_start: bool = False) -> Array:
    """bool[P, G, T]: tokens inside a run of `size` tokens that occurred before; never tokens of its first occurrence.

    `only_start` ignores a repeat that begins less than `size + 1` tokens after the previous one.
    """
    def recent(flags, first, last):
        """Whether a flag is set anywhere from `first` to `last` tokens back."""
        count = jnp.pad(jnp.cumsum(flags, axis=-1, dtype=jnp.int32), ((0, 0), (last + 1, 0)))
        length = flags.shape[-1]
        return count[..., last + 1 - first : last + 1 - first + length] > count[..., :length]

    def of_prompt(rows):
        tokens_GT, mask_GT = rows
        starts = jax.vmap(lambda tokens, mask: repeated_starts(tokens, mask, size))(tokens_GT, mask_GT)
        if only_start:
            starts = starts & ~recent(starts, 1, size)
        return recent(starts, 0, size - 1) & mask_GT

    # One prompt after the other: the sorts need a dozen arrays as large as their input.
    return lax.map(of_prompt, (tokens_PGT, mask_PGT))


@estimator
def demystify_cot(*, max_len: int = 14336, correct: tuple[float, float] = (2.0, 1.0), wrong: tuple[float, float] = (-10.0, 0.0),
                  exceed: float = -10.0, margin: int = 16, ngram: int = 40, penalty: float = -0.05, only_start: bool = False,
                  gamma: float = 1.0, gamma_penalty: float = 0.99, kl_coef: float = 0.01) -> Estimator:
    """`A_t = G_t(outcome; gamma) + G_t(penalty; gamma_penalty) - V_t`, G the discounted sum to the end.

    The outcome, on the last token, is `cosine_reward` of the length, right where the reward is above 1/2; `penalty`
    falls on tokens of a repeated run of `ngram` tokens, see `repetition`, and its discount keeps the blame near them.
    Half of `-kl_coef * (old_logprobs - ref_logprobs)` is added to each channel. V is `extras["values"]` f32[P, G, T].
    The numbers are those of the released scripts, which also have `correct` at (6, 5), (10, 9), or (0, 10) with `wrong`
    at (0, 0). The critic is fitted to the sum of the two returns.
    """
    if ngram < 1 or max_len < 1:
        raise ValueError(f"ngram={ngram} and max_len={max_len} are numbers of tokens; both must be at least 1")

    def returns(rollouts):
        mask = rollouts.token_mask
        outcome = cosine_reward(rollouts.correct, rollouts.lengths, max_len=max_len, correct=correct,
                                wrong=wrong, exceed=exceed, margin=margin).astype(rollouts.rewards.dtype)
        outcome = jnp.where(masked.last_token(mask), outcome[..., None], 0)
        blame = penalty * repetition(rollouts.tokens, mask, size=ngram, only_start=only_start).astype(outcome.dtype)
        if kl_coef:
            half = kl_coef / 2 * (rollouts.old_logprobs - rollouts.ref_logprobs)
            outcome, blame = outcome - half, blame - half
        outcome = masked.discounted_return(outcome, mask, gamma=gamma)
        return outcome + masked.discounted_return(blame, mask, gamma=gamma_penalty)

    needs = ("rewards", "tokens", "values", *(("old_logprobs", "ref_logprobs") if kl_coef else ()))
    return stateless(lambda rollouts: returns(rollouts) - rollouts.extras["values"], needs=needs,
                     value_targets=lambda rollouts, monte_carlo: returns(lax.stop_gradient(clean(rollouts, *needs))))
