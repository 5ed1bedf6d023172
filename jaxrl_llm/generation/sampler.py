"""Rollouts in one compiled program: prefill each prompt once, then decode its whole group against the shared cache."""
import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.generation.sampling import Sampling, draw
from jaxrl_llm.models.transformer import Transformer


@flax.struct.dataclass
class Completions:
    """What the sampler returns for P prompts and G completions each, at most T tokens long.

    Attributes:
      tokens: `i32[P, G, T]`, 0 beyond the end.
      mask: `bool[P, G, T]`, sampled tokens, the stop token included. Made where tokens are made, never from ids.
      logprobs: `f32[P, G, T]`, log-prob of each token under the distribution it was drawn from.
      entropies: `f32[P, G, T]`, entropy of that distribution, nats.
      stopped: `bool[P, G]`, ended by a stop token (False: cut at T).
      decode_steps: `i32[]`, decode steps that were run, the same for all rows; the first token needs none.
    """

    tokens: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    entropies: jax.Array
    stopped: jax.Array
    decode_steps: jax.Array


def row_keys(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """One key per row, a function of the row's id alone: any row can be drawn again without its batch."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids.reshape(-1)).reshape(row_ids.shape)


@functools.partial(jax.jit, static_argnames=("model", "max_tokens", "stop_ids", "chunk"))
def generate(model: Transformer, params, prompt_tokens, prompt_mask, keys, sampling: Sampling, *,
             max_tokens: int, stop_ids: tuple[int, ...], chunk: int = 16, lora=None) -> Completions:
    """Samples a group of completions for every prompt.

    Token t of a row is drawn with `fold_in(row key, t)`. Decoding runs in chunks of `chunk` steps (`lax.scan`) inside a
    `while_loop` that ends as soon as every row has stopped; finished rows are inert.

    Args:
      model, params, lora: the policy.
      prompt_tokens, prompt_mask: `i32[P, S]`, `bool[P, S]`, padded on either side, one real token at least.
      keys: typed PRNG keys `[P, G]`, see `row_keys`.
      sampling: distribution to draw from.
      max_tokens: `T`.
      stop_ids: tokens that end a completion; an empty tuple decodes T tokens in every row.
      chunk: decode steps between two checks whether all rows have stopped, at most; it is lowered to a divisor of T - 1.
    """
    chex.assert_rank([prompt_tokens, prompt_mask], 2)
    P, G = keys.shape
    # The first token comes from the prefill; the others in chunks of equal size, so that no step runs in vain.
    slots = max(1, max_tokens - 1)
    chunk = max(n for n in range(1, chunk + 1) if slots % n == 0)
    layers = model.unstack_layers(params, lora)
    prompt, last = model.prefill(params, prompt_tokens, prompt_mask, lora=lora)
    unembedding = model.unembedding(params).astype(model.dtype)
    stops = jnp.asarray(stop_ids, jnp.int32)

    def sample(normed, t, alive):
        logits = jnp.einsum("pgd,vd->pgv", normed, unembedding, preferred_element_type=jnp.float32)
        step_keys = jax.vmap(lambda k: jax.random.fold_in(k, t))(keys.reshape(-1))
        token, logprob, entropy = (x.reshape(P, G) for x in draw(step_keys, logits.reshape(P * G, -1), sampling))
        out = (jnp.where(alive, token, 0), alive, jnp.where(alive, logprob, 0.0), jnp.where(alive, entropy, 0.0))
        return out, alive & ~jnp.isin(token, stops)

    def decode(carry, _):
        t, token, cache, alive = carry
        normed, cache = model.decode_step(params, layers, token, t, prompt, cache)
        out, alive = sample(normed, t + 1, alive)
        return (t + 1, out[0], cache, alive), out

    def decode_chunk(loop):
        carry, buffers = loop
        start = carry[0] + 1
        carry, outs = jax.lax.scan(decode, carry, None, length=chunk)
        write = lambda buffer, out: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
            buffer, jnp.moveaxis(out, 0, 2), start, axis=2)
        return carry, jax.tree.map(write, buffers, outs)

    first, alive = sample(jnp.broadcast_to(last[:, None], (P, G, last.shape[-1])), 0, jnp.ones((P, G), bool))
    buffers = tuple(jnp.zeros((P, G, slots + 1), x.dtype).at[:, :, 0].set(x) for x in first)
    carry = (jnp.int32(0), first[0], model.empty_completions(prompt, G, slots), alive)
    unfinished = lambda loop: (loop[0][0] + 1 < max_tokens) & loop[0][3].any()  # noqa: E731
    (steps, _, _, alive), buffers = jax.lax.while_loop(unfinished, decode_chunk, (carry, buffers))
    tokens, mask, logprobs, entropies = (b[:, :, :max_tokens] for b in buffers)
    stopped = ~alive & jnp.isin(jnp.take_along_axis(tokens, mask.sum(-1, keepdims=True) - 1, 2)[:, :, 0], stops)
    return Completions(tokens, mask, logprobs, entropies, stopped, steps)
