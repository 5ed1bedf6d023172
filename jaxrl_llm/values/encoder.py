"""A frozen text encoder for V0: the hidden states of any model that `jaxrl_llm.models.weights` reads, embedding models too."""
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_llm.values.features import pooled


class Encoder(NamedTuple):
    """`encode(texts) -> (states f32[B, S, D], mask bool[B, S])`: final normed states of all tokens, padded on the right.

    `size` is D. The arrays are on the host; S is the longest text of the call, in multiples of 8, at most `max_tokens`.
    """

    encode: Callable[[Sequence[str]], tuple[np.ndarray, np.ndarray]]
    size: int


def of_model(model: Any, params: Any, tokenizer: Any, *, max_tokens: int = 2048, batch: int = 32) -> Encoder:
    """The encoder of a loaded model, for instance of the policy. Longer texts keep their last `max_tokens` tokens."""
    forward = jax.jit(lambda params, tokens, mask: model.hidden_states(params, tokens, mask)[0].astype(jnp.float32))

    def encode(texts):
        rows = [tokenizer.encode(text, add_bos=tokenizer.adds_bos)[-max_tokens:] for text in texts]
        length = -(-max(map(len, rows)) // 8) * 8
        tokens, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
        for i, row in enumerate(rows):
            tokens[i, :len(row)], mask[i, :len(row)] = row, True
        states = np.zeros((len(rows), length, model.config.hidden_size), np.float32)
        order = np.argsort([len(row) for row in rows])
        for start in range(0, len(rows), batch):  # few shapes: the last call is filled up, widths are powers of two
            part = order[np.minimum(np.arange(start, start + batch), len(rows) - 1)]
            width = min(max(8, 1 << (len(rows[part[-1]]) - 1).bit_length()), length)
            states[part, :width] = forward(params, tokens[part, :width], mask[part, :width])
        return states, mask

    return Encoder(encode, model.config.hidden_size)


def load(path: str | Path, **options) -> Encoder:
    """`of_model` of a Hugging Face directory or .gguf file; for instance Qwen3-Embedding-0.6B."""
    from jaxrl_llm import tokenizers
    from jaxrl_llm.models import weights
    from jaxrl_llm.models.transformer import Transformer

    architecture, params = weights.load(path)
    return of_model(Transformer(architecture), params, tokenizers.load(str(path)), **options)


def summary(states: Array, mask: Array) -> Array:
    """f32[B, 2 D] of `states` [B, S, D]: mean over the tokens and state of the last one; features for kNN and ridge."""
    states = jnp.asarray(states)
    last = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1])[None], 0), axis=1)
    end = jnp.take_along_axis(states, last[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([pooled(states, jnp.asarray(mask)), end.astype(jnp.float32)], axis=1)
