"""Training of V0: the head on the synthetic prior, then the adapter on recorded histories (arXiv 2602.03584)."""
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxrl_llm.maths import masked
from jaxrl_llm.values.v0 import V0
from jaxrl_llm.values.v0_prior import sample_tasks


def label(scores: Array) -> Array:
    """Soft labels `(clip(s, -1, 1) + 1) / 2` in [0, 1] of mean rewards between -1 and 1."""
    return (jnp.clip(scores, -1, 1) + 1) / 2


def pairs(labels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(positive, negative, real)`, i32[size] rows to be ranked and which of these pairs exist.

    Row k of the commoner class (label at least 0.5, or below) is paired with row k of the rarer one, which is cycled.
    One class only: no pairs.
    """
    right, wrong = np.flatnonzero(labels >= 0.5), np.flatnonzero(labels < 0.5)
    n = min(max(len(right), len(wrong)), size) if len(right) and len(wrong) else 0
    def cycled(rows):
        return np.resize(rows, size) if n else np.zeros(size, int)
    return cycled(right).astype(np.int32), cycled(wrong).astype(np.int32), np.arange(size) < n


def loss(logits: Array, labels: Array, positive: Array, negative: Array, real: Array, *, ranking: float = 0.25
         ) -> tuple[Array, dict[str, Array]]:
    """`a L_rank + (1 - a) L_CE` of the queries of one context, and both parts.

        s = logit_1 - logit_0,   L_rank = mean over pairs of -log sigmoid(s_positive - s_negative),
        L_CE = mean of -(y log sigmoid(s) + (1 - y) log sigmoid(-s))

    The policy's ability, which the context shows, lowers cross-entropy without any look at the prompts; in a difference
    between two queries of one context it cancels. `logits` f32[Q, 2], `labels` f32[Q]; pairs as from `pairs`.
    """
    s = logits[:, 1] - logits[:, 0]
    rank = masked.mean(-jax.nn.log_sigmoid(s[positive] - s[negative]), real)
    cross_entropy = jnp.mean(optax.sigmoid_binary_cross_entropy(s, labels))
    return ranking * rank + (1 - ranking) * cross_entropy, {"rank": rank, "cross_entropy": cross_entropy}


def make_optimizer(learning_rate: float, steps: int, *, weight_decay: float = 0.01) -> optax.GradientTransformation:
    """AdamW, 5 % warm-up and a cosine to 0, gradient norm at most 1; only matrices decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 20, 1), steps)
    def matrices(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=weight_decay, mask=matrices))


def fit_head(model: V0, params, *, steps: int, batch: int = 16, context: int = 128, queries: int = 32,
             learning_rate: float = 1e-3, seed: int = 0, report: Callable[[int, float], None] = lambda step, loss: None):
    """Parameters whose head has seen `steps * batch` tasks of the synthetic prior. `report(step, loss)` now and then.

    The loss is the cross-entropy against the true success of the queries, so its least value is the queries' entropy.
    """
    optimizer, rng = make_optimizer(learning_rate, steps), np.random.default_rng(seed)

    def batch_loss(head, tasks):
        logits = jax.vmap(lambda t: model.logits({"head": head}, t.features, t.outcomes, t.mask, t.queries))(tasks)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits[..., 1] - logits[..., 0], tasks.success))

    @jax.jit
    def step(head, state, tasks):
        value, gradient = jax.value_and_grad(batch_loss)(head, tasks)
        change, state = optimizer.update(gradient, state, head)
        return optax.apply_updates(head, change), state, value

    head = params["head"]
    state = optimizer.init(head)
    for number in range(steps):
        tasks = sample_tasks(rng, batch, context=context, queries=queries, features=model.head.features)
        head, state, value = step(head, state, tasks)
        if number % 20 == 19 or number == steps - 1:
            report(number + 1, float(value))
    return params | {"head": head}


class Episode(NamedTuple):
    """One context and its queries, as rows of a table of prompts: i32[N], f32[N], bool[N]; i32[Q], f32[Q] and their pairs."""

    context: np.ndarray
    outcomes: np.ndarray
    mask: np.ndarray
    queries: np.ndarray
    labels: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    real: np.ndarray


def fit_adapter(model: V0, params, states: np.ndarray, mask: np.ndarray, episodes: Iterator[Episode], *, steps: int,
                batch: int = 2, learning_rate: float = 2e-4, ranking: float = 0.25, tune_head: bool = False, seed: int = 0,
                report: Callable[[int, float], None] = lambda step, loss: None) -> Any:
    """Parameters with the adapter (and, with `tune_head`, the head) trained on recorded histories.

    `states` [U, S, D], `mask` bool[U, S]: the encoder's token states of the prompts that episodes name by row. Each
    step takes the mean gradient over `batch` episodes (the paper accumulates 2); context and queries go through the same
    adapter, each prompt once, and gradients flow through the head.
    """
    optimizer = make_optimizer(learning_rate, steps)
    frozen = {} if tune_head else {"head": params["head"]}

    def one(trained, z, episode):
        # Only the head's parameters are frozen: what the adapter learns, it learns through the head.
        logits = model.logits(trained | frozen, z[episode.context], episode.outcomes, episode.mask, z[episode.queries])
        return loss(logits, episode.labels, episode.positive, episode.negative, episode.real, ranking=ranking)[0]

    @jax.jit
    def step(trained, state, states, mask, rows, drawn, key):
        def mean(tree):
            z = model.encode(tree, states[rows].astype(jnp.float32), mask[rows], dropout_key=key)
            return jnp.mean(jax.vmap(one, in_axes=(None, None, 0))(tree, z, drawn))

        value, gradient = jax.value_and_grad(mean)(trained)
        change, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, change), state, value

    states, mask = jnp.asarray(states), jnp.asarray(mask)
    trained, key = {name: tree for name, tree in params.items() if name not in frozen}, jax.random.key(seed)
    state = optimizer.init(trained)
    for number in range(steps):
        drawn = Episode(*(np.stack(x) for x in zip(*(next(episodes) for _ in range(batch)))))
        named = np.concatenate([drawn.context, drawn.queries], axis=1)
        rows, places = np.unique(named, return_inverse=True)
        rows = np.pad(rows, (0, min(len(states), named.size) - len(rows)), mode="edge")  # one shape for all steps
        context, queries = np.split(places.reshape(named.shape), [drawn.context.shape[1]], axis=1)
        drawn = drawn._replace(context=context, queries=queries)
        trained, state, value = step(trained, state, states, mask, rows, drawn, jax.random.fold_in(key, number))
        if number % 20 == 19 or number == steps - 1:
            report(number + 1, float(value))
    return params | trained
