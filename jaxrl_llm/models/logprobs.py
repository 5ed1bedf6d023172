"""Log-probs and entropies of given tokens in chunks of rows, so that no `[tokens, V]` array outlives a chunk."""
import chex
import jax
import jax.numpy as jnp


def token_logprobs(normed, unembedding, tokens, *, temperature=1.0, chunk: int = 512):
    """Log-prob of each token and entropy of its distribution, softmax(h W^T / temperature), in float32.

    The backward pass computes each chunk's logits again: memory is one chunk of logits, whatever the vocabulary.

    Args:
      normed: `[N, D]` final normed states.
      unembedding: `[V, D]`, cast to the dtype of `normed` chunk by chunk, so that its gradient adds up in its own.
      tokens: `i32[N]`.
      temperature: the sampler's; log-probs of both then describe the same distribution.
      chunk: rows per chunk.
    Returns:
      `(logprobs f32[N], entropies f32[N])`; entropies carry no gradient.
    """
    chex.assert_rank([normed, unembedding, tokens], [2, 2, 1])
    count = normed.shape[0]
    chunk = min(chunk, count)
    pad = -count % chunk
    rows = jnp.pad(normed, ((0, pad), (0, 0))).reshape(-1, chunk, normed.shape[1])
    targets = jnp.pad(tokens, (0, pad)).reshape(-1, chunk)

    @jax.checkpoint
    def one_chunk(h, targets):
        logits = jnp.einsum("nd,vd->nv", h, unembedding.astype(h.dtype), preferred_element_type=jnp.float32) / temperature
        total = jax.nn.logsumexp(logits, axis=-1)
        logprobs = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0] - total
        fixed = jax.lax.stop_gradient(logits - total[:, None])
        return logprobs, -(jnp.exp(fixed) * fixed).sum(-1)

    logprobs, entropies = jax.lax.map(lambda x: one_chunk(*x), (rows, targets))
    return logprobs.reshape(-1)[:count], entropies.reshape(-1)[:count]
