"""Embeddings of the training prompts under a run's initial policy, for controllers that compare problems."""
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.engines.prompts import pad
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.values import features

_ROWS = 64  # prompts per call


def prompt_embeddings(policy: Policy, params, rows: Sequence[Sequence[int] | None], length: int) -> np.ndarray:
    """f32[N, D]: the mean over its tokens of the last block's output, for each prompt of at most `length` tokens.

    The row of a prompt that is None or longer is 0.
    """
    @jax.jit
    def look(params, tokens, mask):
        return policy.model.hidden_states(params, tokens, mask, pool=lambda x: features.pooled(x, mask))[2][-1]

    embeddings = np.zeros((len(rows), policy.model.config.hidden_size), np.float32)
    fitting = [number for number, row in enumerate(rows) if row is not None and 0 < len(row) <= length]
    for start in range(0, len(fitting), _ROWS):
        numbers = fitting[start:start + _ROWS]
        batch = pad([list(rows[n] or ()) for n in numbers] + [[0]] * (_ROWS - len(numbers)), [0] * _ROWS, length)
        placed = (batch.tokens, batch.mask)
        if policy.mesh is not None:
            placed = parallel.put(placed, parallel.replicated(policy.mesh))
        embeddings[numbers] = parallel.fetch(look(params, *placed))[:len(numbers)]
    return embeddings
