"""Completions of held-out problems by the policy of a checkpoint, and passes of any policy over them."""
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl_llm.data import forest as forests
from jaxrl_llm.data.forest import Forest
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.runs.trained import Trained
from jaxrl_llm.sampling.heldout import sample_held_out


def sampled(run: Trained, problems: int, seed: int) -> tuple[Forest, Rollouts]:
    """A group of completions for each of `problems` held-out problems, and the view of them.

    Raises ValueError: the run has an environment, or no held-out prompt fits.
    """
    if run.source.stream.partner.goes_on:
        raise ValueError(f"the run is one in the environment {run.config.environment!r}; this diagnostic reads completions of "
                         "one turn")
    forest = sample_held_out(run.source, run.params, run.lora, problems, jax.random.key(seed))
    view = forests.paths(forest, group=run.source.stream.group, prompts=len(forest.problems), version=run.step,
                         tokens=lambda longest: longest, prompt_tokens=lambda longest: longest)
    return forest, view


class CompletionRows(struct.PyTreeNode):
    """Completions as plain rows: the prompt, padded on the left to S tokens, then the completion.

    tokens: `i32[B, S + T]`.  mask: `bool[B, S + T]`.  start: S.
    """

    tokens: jax.Array | np.ndarray
    mask: jax.Array | np.ndarray
    start: int = struct.field(pytree_node=False)


def plain(rollouts: Rollouts) -> CompletionRows:
    """The `P x G` completions as rows, prompt by prompt."""
    group, S = rollouts.mask.shape[1], rollouts.prompt_mask.shape[1]
    prompts = np.zeros((len(rollouts.mask), S), np.int32)
    there = np.sort(np.asarray(rollouts.prompt_mask), axis=1)
    prompts[there] = np.asarray(rollouts.prompt_tokens)[np.asarray(rollouts.prompt_mask)]
    def each(x):
        return np.repeat(x, group, axis=0)
    def flat(x):
        return np.asarray(x).reshape(-1, rollouts.mask.shape[2])
    return CompletionRows(np.concatenate([each(prompts), flat(rollouts.tokens)], axis=1),
                          np.concatenate([each(there), flat(rollouts.token_mask)], axis=1), S)


def logprobs(policy: Policy, params, lora, rows: CompletionRows, perturb: Callable | None = None, pool: Callable | None = None):
    """Log-probs `f32[B, T]` of the completion tokens, and what `pool` keeps of each layer, see `Transformer.hidden_states`."""
    states, _, pooled = policy.model.hidden_states(params, rows.tokens, rows.mask, lora=lora, perturb=perturb, pool=pool)
    before, targets = states[:, rows.start - 1:-1], rows.tokens[:, rows.start:]
    config = policy.model.config
    flat, _ = token_logprobs(before.reshape(-1, before.shape[-1]), policy.model.unembedding(params), targets.reshape(-1),
                             temperature=policy.temperature, divisor=config.logit_divisor, softcap=config.logit_softcap,
                             chunk=policy.chunk)
    return flat.reshape(targets.shape), pooled


@functools.partial(jax.jit, static_argnums=0)
def distributions(policy: Policy, params: Any, lora: Any, rows: CompletionRows) -> jax.Array:
    """Probabilities `f32[B, T, V]` of every token at each place of the completions, at the policy's temperature."""
    states, _, _ = policy.model.hidden_states(params, rows.tokens, rows.mask, lora=lora)
    return jax.nn.softmax(policy.model.logits(params, states[:, rows.start - 1:-1]) / policy.temperature, axis=-1)


def candidates(prompt_tokens: np.ndarray, prompt_mask: np.ndarray, texts: Sequence[Sequence[Sequence[int]]]) -> Rollouts:
    """Prompts `[P, S]` with completions of your own, `texts[P][C]` of token ids; missing ones are not valid."""
    shape = len(texts), max(map(len, texts)), max(len(ids) for row in texts for ids in row)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for p, row in enumerate(texts):
        for c, ids in enumerate(row):
            tokens[p, c, :len(ids)], mask[p, c, :len(ids)] = ids, True
    return Rollouts(mask=jnp.asarray(mask), valid=jnp.asarray(mask.any(-1)), tokens=jnp.asarray(tokens),
                    prompt_tokens=jnp.asarray(prompt_tokens), prompt_mask=jnp.asarray(prompt_mask))
