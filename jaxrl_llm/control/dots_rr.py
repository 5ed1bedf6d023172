"""DOTS: problems with a predicted success rate near 1/2, from a few measured problems (arXiv 2506.05316)."""
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.control.passes import key_of

Networks = dict[str, Any]
_NEVER = -1e30  # the logit of a reference problem that is not read


class Reference(NamedTuple):
    """State of the reference problems and of the predictor.

    `embeddings` f32[N, D] of all problems; `predicted` f32[N], their success rates; `networks` of the predictor with the
    `moments` of their optimiser; `next_ids` i32[K], problems to measure next, below 0: none; `seed` u32[2], `step` i32[].
    """

    embeddings: Array
    predicted: Array
    networks: Networks
    moments: Any
    next_ids: Array
    seed: Array
    step: Array


def attention(queries: Array, references: Array, *, tau: float = 1.0, read: Array | None = None) -> Array:
    """f32[Q, K], rows that sum to 1: `softmax(q . r / sqrt(d) / tau)` of [Q, d] and [K, d], over those `read` bool[Q, K]."""
    logits = queries @ references.T / jnp.sqrt(queries.shape[-1]) / tau
    return jax.nn.softmax(logits if read is None else jnp.where(read, logits, _NEVER), axis=-1)


def calibrated(base: Array, temperature: Array, bias: Array) -> Array:
    """`sigmoid(logit(base) / temperature + bias)`, base clipped to [1e-4, 1 - 1e-4]."""
    inside = jnp.clip(base, 1e-4, 1 - 1e-4)
    return jax.nn.sigmoid(jnp.log(inside / (1 - inside)) / temperature + bias)


def calibration(outputs: Array) -> tuple[Array, Array]:
    """Temperature and bias from the two outputs of the paper's head: `clip(softplus(o1), .01, 10)`, `tanh(o2)`."""
    return jnp.clip(jax.nn.softplus(outputs[0]), 0.01, 10), jnp.tanh(outputs[1])


def selection(predicted_N: Array, *, target: float = 0.5, tau: float = 1e-3) -> Array:
    """f32[N], summing to 1: `exp(-|predicted - target| / tau)`; problems whose weight underflows are equal and drawn last."""
    near = -jnp.abs(predicted_N - target) / tau
    return jax.nn.softmax(jnp.maximum(near - near.max(), -80.0))


def networks(key: Array, size: int, *, width: int = 896) -> Networks:
    """Networks for queries and for references, which begin alike, and the calibration's head, which begins with 1 and 0.

    Both have three layers between two norms, from embeddings of `size` to `width`; the head 2 -> 10 -> 2. Alike they attend to
    similar problems before anything is learned.
    """
    keys = jax.random.split(key, 4)

    def linear(key, rows, columns):
        return {"kernel": jax.random.normal(key, (rows, columns)) / math.sqrt(rows), "bias": jnp.zeros(columns)}

    def norm(size):
        return {"scale": jnp.ones(size), "bias": jnp.zeros(size)}

    tower = {"before": norm(size), "after": norm(width),
             "layers": [linear(key, rows, width) for key, rows in zip(keys, (size, width, width))]}
    last = {"kernel": jnp.zeros((10, 2)), "bias": jnp.array([math.log(math.e - 1), 0.0])}  # softplus gives 1
    return {"query": tower, "reference": jax.tree.map(jnp.copy, tower), "head": [linear(keys[3], 2, 10), last]}


def projected(tower: Networks, x: Array, key: Array | None = None, *, dropout: float = 0.1) -> Array:
    """f32[n, width] of embeddings [n, D]: norm, three layers with GELU between them, norm; with a `key`, hidden units drop."""
    def norm(part, x):
        return jax.nn.standardize(x, epsilon=1e-5) * part["scale"] + part["bias"]

    x = norm(tower["before"], x)
    for number, layer in enumerate(tower["layers"]):
        x = x @ layer["kernel"] + layer["bias"]
        if number + 1 < len(tower["layers"]):
            x = jax.nn.gelu(x)
            if key is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - dropout, x.shape)
                x = jnp.where(kept, x / (1 - dropout), 0)
    return norm(tower["after"], x)


def predictions(own: Networks, queries: Array, references: Array, rates_K: Array, read: Array, *, tau: float = 1.0,
                key: Array | None = None) -> Array:
    """f32[Q], the success rates of problems [Q, D] from those of measured ones [K, D] that each `read`s, bool[Q, K].

    Attention between both networks' outputs takes the mean of the rates, the head calibrates it from the mean and the sample
    deviation of the rates that are read by any. With a `key` hidden units drop, as for training. A problem that reads none gets
    a meaningless number.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    weights = attention(projected(own["query"], queries, keys[0]), projected(own["reference"], references, keys[1]), tau=tau,
                        read=read)
    known = read.any(0)
    count = jnp.maximum(known.sum(), 1)
    mean = jnp.sum(rates_K, where=known) / count
    deviation = jnp.sqrt(jnp.sum((rates_K - mean) ** 2, where=known) / jnp.maximum(count - 1, 1))
    hidden = jax.nn.relu(jnp.stack([mean, deviation]) @ own["head"][0]["kernel"] + own["head"][0]["bias"])
    temperature, bias = calibration(hidden @ own["head"][1]["kernel"] + own["head"][1]["bias"])
    return calibrated(weights @ rates_K, temperature, bias)


def fitted(own: Networks, moments: Any, x_KD: Array, rates_K: Array, known_K: Array, key: Array, *,
           optimizer: optax.GradientTransformation, epochs: int = 20, tau: float = 1.0) -> tuple[Networks, Any]:
    """Networks and moments after `epochs` steps on measured problems, each predicted from the others, by cross-entropy."""
    read = known_K & ~jnp.eye(len(x_KD), dtype=bool)
    counted = known_K & read.any(1)

    def loss(own, key):
        p = predictions(own, x_KD, x_KD, rates_K, read, tau=tau, key=key)
        entropy = -(rates_K * jnp.log(jnp.maximum(p, 1e-6)) + (1 - rates_K) * jnp.log(jnp.maximum(1 - p, 1e-6)))
        return jnp.sum(entropy, where=counted) / jnp.maximum(counted.sum(), 1)

    def step(carry, number):
        own, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(own, jax.random.fold_in(key, number)), moments, own)
        return (optax.apply_updates(own, updates), moments), None

    return jax.lax.scan(step, (own, moments), jnp.arange(epochs))[0]


@controller
def dots_rr(*, reference: int = 256, every: int = 2, target: float = 0.5, tau: float = 1e-3, tau_attention: float = 1.0,
            width: int = 896, epochs: int = 20, learning_rate: float = 1e-3) -> Controller:
    """`prompt_weights` f32[N]: `selection` of `predictions`; `reference_ids` i32[K] in every `every`-th step.

    The reference problems are drawn at random and measured with the weights of that step, for the following steps. The
    predictor is then `fitted` to them, from where earlier measurements left it; the paper trains it once, before the run, on
    many measurements. Embeddings come from the run's initial policy, standardised over the problems to mean 0 and deviation 1;
    the paper's come from another model. Before the first measurement all predictions are 1/2. Facts: `reference_rates`. Raises
    ValueError: fewer than two reference problems, or a step, a tau, a width or a learning rate that is not positive.
    """
    if reference < 2 or every < 1 or tau <= 0 or tau_attention <= 0:
        raise ValueError(f"reference={reference} problems every={every} steps, tau={tau}, tau_attention={tau_attention}; give "
                         "2 or more problems, and the others above 0")
    if width < 2 or epochs < 0 or learning_rate <= 0:
        raise ValueError(f"width={width}, epochs={epochs}, learning_rate={learning_rate} of the predictor; give 2 or more, 0 "
                         "(it stays as it begins) or more, and a rate above 0")
    optimizer = optax.adam(learning_rate)

    def asked(seed, step, prompts, count):
        order = jax.random.permutation(key_of(seed, step), prompts)[:count].astype(jnp.int32)
        return jnp.where(step % every == 0, order, -1)

    def init(embeddings, seed):
        x = jnp.asarray(embeddings, jnp.float32)
        spread = x.std(0)
        x = (x - x.mean(0)) / jnp.where(spread > 0, spread, 1)
        own = networks(jax.random.fold_in(key_of(seed, jnp.int32(0)), 1), x.shape[1], width=width)
        return Reference(x, jnp.full(len(x), 0.5, jnp.float32), own, optimizer.init(own),
                         asked(seed, jnp.int32(0), len(x), min(reference, len(x))), jnp.asarray(seed), jnp.int32(0))

    def propose(state):
        return {"prompt_weights": selection(state.predicted, target=target, tau=tau), "reference_ids": state.next_ids}

    def observe(state, facts):
        known = jnp.isfinite(facts["reference_rates"]) & (state.next_ids >= 0)
        rates, x = jnp.where(known, facts["reference_rates"], 0), state.embeddings[jnp.maximum(state.next_ids, 0)]

        def learned(state):
            own, moments = fitted(state.networks, state.moments, x, rates, known, jax.random.fold_in(
                key_of(state.seed, state.step), 2), optimizer=optimizer, epochs=epochs, tau=tau_attention)
            read = jnp.broadcast_to(known, (len(state.embeddings), len(known)))
            predicted = predictions(own, state.embeddings, x, rates, read, tau=tau_attention)
            return state._replace(networks=own, moments=moments, predicted=predicted)

        state, step = jax.lax.cond(known.any(), learned, lambda state: state, state), state.step + 1
        return state._replace(next_ids=asked(state.seed, step, len(state.embeddings), state.next_ids.size), step=step)

    return Controller(init, propose, observe, facts=("reference_rates",), knobs=("prompt_weights", "reference_ids"))
