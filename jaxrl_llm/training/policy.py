"""Log-probs of completions under a policy: the one function that the update, the score pass and the reference share."""
import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.rollouts import Rollouts
from jaxrl_llm.values import features


@dataclasses.dataclass(frozen=True)
class Capture:
    """What value models read of a forward pass, see `values.features`.

    Attributes:
      layer: index of the block whose output is pooled; a tuple for several at once, to search among them.
      pool: n, the last prompt tokens and reasoning tokens that are averaged.
      marker: token ids that end the reasoning; () where completions have no such mark.
    """

    layer: int | tuple[int, ...]
    pool: int = 10
    marker: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Policy:
    """A model and the temperature at which it speaks, as a function of its parameters.

    Attributes:
      model: the transformer.
      temperature: the sampler's, so that learner and sampler describe the same distribution (that of the whole vocabulary:
        what top-k, top-p or min-p cut away counts here, and shows as mismatch/kl in the metrics).
      chunk: rows of logits held at a time.
    """

    model: Transformer
    temperature: float = 1.0
    chunk: int = 512

    def logprobs(self, params, lora, rollouts: Rollouts) -> tuple[jax.Array, jax.Array]:
        """Log-prob of every completion token and entropy at its place: `(f32[P, G, T], f32[P, G, T])`, nats."""
        return self._forward(params, lora, rollouts)[:2]

    def logprobs_and_features(self, params, lora, rollouts: Rollouts, capture: Capture):
        """As `logprobs`, with `phi f32[P, G, 2D + 3]` of the chosen block from the same pass (`[P, G, K, 2D + 3]` for K).

        States are pooled inside the pass: nothing of shape `[tokens, D]` is kept of a layer.
        """
        r = rollouts
        spans = features.spans(r.tokens, r.token_mask, capture.marker)
        prompt_span = features.last_tokens(r.prompt_mask, capture.pool)
        span = features.last_tokens(spans.reasoning, capture.pool)
        pool = lambda prompt, states: (features.pooled(prompt, prompt_span), features.pooled(states, span))  # noqa: E731
        logprobs, entropies, pooled = self._forward(params, lora, rollouts, pool)
        means = features.mean_entropies(entropies, r.token_mask, spans)
        of_layer = lambda i: features.phi(pooled[0][i], pooled[1][i], means)  # noqa: E731
        single = isinstance(capture.layer, int)
        return logprobs, entropies, of_layer(capture.layer) if single else jnp.stack(list(map(of_layer, capture.layer)), axis=2)

    def _forward(self, params, lora, rollouts: Rollouts, pool=None):
        r, model = rollouts, self.model
        states, pooled = model.packed_states(params, r.prompt_tokens, r.prompt_mask, r.tokens, r.mask, lora=lora, pool=pool)
        flat = states.reshape(-1, states.shape[-1])
        logprobs, entropies = token_logprobs(
            flat, model.unembedding(params), r.tokens.reshape(-1), temperature=self.temperature, chunk=self.chunk)
        return logprobs.reshape(r.tokens.shape), entropies.reshape(r.tokens.shape), pooled
