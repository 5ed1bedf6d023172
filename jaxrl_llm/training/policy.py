"""Log-probs of completions under a policy: the one function that the update, the score pass and the reference share."""
import dataclasses

import jax

from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.rollouts import Rollouts


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
        r, model = rollouts, self.model
        states, _ = model.packed_states(params, r.prompt_tokens, r.prompt_mask, r.tokens, r.mask, lora=lora)
        flat = states.reshape(-1, states.shape[-1])
        logprobs, entropies = token_logprobs(
            flat, model.unembedding(params), r.tokens.reshape(-1), temperature=self.temperature, chunk=self.chunk)
        return logprobs.reshape(r.tokens.shape), entropies.reshape(r.tokens.shape)
