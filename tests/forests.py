"""Trajectories as trees of tokens, and as plain rows, one per trajectory: the reference of packed rows."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.packing import Trees
from jaxrl_llm.data.rollouts import Rollouts


class Case(NamedTuple):
    """A forest, the leaf of each trajectory `i32[P, G]`, and its trained tokens `bool[P, G, T]`."""

    forest: Trees
    leaves: np.ndarray
    mask: np.ndarray

    def path(self, leaf: int) -> list[int]:
        return [] if leaf < 0 else [*self.path(self.forest.parent[leaf]), int(leaf)]

    def tokens_of(self, nodes) -> np.ndarray:
        parts = [self.forest.tokens[self.forest.offsets[i]:self.forest.offsets[i + 1]] for i in nodes]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def trajectories(self):
        """`(prompt, rest, mask)` of each trajectory that exists and counts, with its indices p, g."""
        for p, g in np.argwhere(self.mask.any(-1)):
            root, *rest = self.path(self.leaves[p, g])
            yield (p, g), self.tokens_of([root]), self.tokens_of(rest), self.mask[p, g]

    def longest(self) -> int:
        return max(len(prompt) + len(rest) for _, prompt, rest, _ in self.trajectories())

    def rollouts(self, **fields) -> Rollouts:
        return Rollouts(mask=self.mask, valid=self.leaves >= 0, **fields)


def of_lengths(rng, parent, lengths, leaves, share=1.0, vocabulary=40) -> Case:
    """Nodes of these lengths and random tokens; each token of a trajectory counts with probability `share`."""
    offsets = np.append(0, np.cumsum(lengths))
    forest = Trees(rng.integers(0, vocabulary, offsets[-1]).astype(np.int32), offsets, np.asarray(parent, np.int32))
    leaves = np.asarray(leaves, np.int32)
    result = Case(forest, leaves, None)
    after = np.array([[sum(np.asarray(lengths)[result.path(leaf)[1:]]) for leaf in row] for row in leaves]).astype(int)
    mask = np.arange(max(after.max(), 1)) < after[..., None]
    return result._replace(mask=mask & (rng.random(mask.shape) < share))


def group(rng) -> Case:
    """Two prompts with three completions each: depth one."""
    return of_lengths(rng, [-1, 0, 0, 0, -1, 4, 4, 4], [4, 5, 2, 7, 3, 1, 6, 6], [[1, 2, 3], [5, 6, 7]])


def conversations(rng) -> Case:
    """Chains of a prompt, a turn, a tool's answer and another turn; the answers are not trained."""
    parent = [-1, 0, 1, 2, 0, 4, 5, -1, 7, 8, 9, 7]
    case = of_lengths(rng, parent, [3, 2, 4, 3, 3, 2, 1, 5, 4, 1, 2, 6], [[3, 6], [10, 11]])
    mask = case.mask.copy()
    mask[0, 0, 2:6] = mask[0, 1, 3:5] = mask[1, 0, 4:5] = False
    return case._replace(mask=mask)


def search(rng) -> Case:
    """Any trees: nodes without tokens, trajectories that end inside or share an end or are missing, and holes."""
    count = rng.integers(2, 14)
    parent = np.array([-1, *(rng.integers(-1, i) for i in range(1, count))])
    lengths = rng.integers(0, 6, count) + (parent < 0)
    return of_lengths(rng, parent, lengths, rng.integers(-1, count, (2, 3)), share=0.7)


class Plain(NamedTuple):
    """One plain row for each trajectory, padded behind: `tokens, mask [P * G, N]`, and `index i32[P, G, T]` into its slots."""

    tokens: np.ndarray
    mask: np.ndarray
    index: np.ndarray


def plain_rows(case: Case, length: int | None = None) -> Plain:
    length, (P, G, T) = length or case.longest(), case.mask.shape
    tokens, mask, index = np.zeros((P * G, length), np.int32), np.zeros((P * G, length), bool), np.full((P, G, T), -1)
    mask[:, 0] = True  # missing trajectories too: no value is undefined
    for (p, g), prompt, rest, counts in case.trajectories():
        row, whole = p * G + g, np.concatenate([prompt, rest])
        tokens[row, :len(whole)], mask[row, :len(whole)] = whole, True
        index[p, g] = np.where(counts, row * length + len(prompt) + np.arange(T), -1)
    return Plain(tokens, mask, index)


def plain_logprobs(model, params, plain: Plain, temperature=1.0, lora=None):
    """`(logprobs, entropies)`, `f32[P, G, T]`, of the tokens that count, each trajectory computed alone."""
    states = model.hidden_states(params, plain.tokens, plain.mask, lora=lora)[0]
    logp = jax.nn.log_softmax(model.logits(params, states) / temperature)
    def first(x):
        return jnp.pad(x, ((0, 0), (1, 0))).reshape(-1)
    own = first(jnp.take_along_axis(logp[:, :-1], plain.tokens[:, 1:, None], 2)[..., 0])
    entropy = first(-(jnp.exp(logp) * logp).sum(-1)[:, :-1])
    return tuple(jnp.where(plain.index >= 0, x[plain.index], 0) for x in (own, entropy))
