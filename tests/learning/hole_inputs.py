"""Trajectories with tokens of others in them, and their update by plain rows, one for each trajectory."""
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import objectives
from jaxrl_llm.advantages.base import ESTIMATORS
from jaxrl_llm.data.rollouts import Role, Rollouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models import lora as lora_lib

# One letter for each token: written by the policy, an environment, a hint or an expert; the capital is an expert's that is
# trained. One trajectory ends with words of others, one has nothing else, two begin with them.
TURNS = (("ppeepp", "hhpppp"), ("p", "peepe"), ("eeee", "pppppp"), ("pxepp", "ppp"), ("hppepp", "eppe"), ("ppp", "pehexp"),
         ("eeeeep", "pp"), ("pXXpep", "p"))
ROLES = {".": Role.PADDING, "p": Role.POLICY, "e": Role.ENVIRONMENT, "h": Role.HINT, "x": Role.EXPERT, "X": Role.EXPERT}
P, G, S, T, V = len(TURNS), 2, 3, 8, 40
MODEL = Transformer(ModelConfig(vocab_size=V, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48))
POLICY = Policy(MODEL, temperature=0.7, chunk=24)
GRADIENT = optax.trace(0.0)  # an optimiser whose state is the last gradient
SEEN: list[tuple[np.ndarray, np.ndarray]] = []  # gradients that went back through log-probs, and which tokens are trained


class Watched(Policy):
    """A policy that keeps the gradients of its log-probs."""

    def logprobs(self, params, lora, rollouts):
        logprobs, entropies = super().logprobs(params, lora, rollouts)
        return watched(logprobs, rollouts.token_mask), entropies

    def logprobs_and_features(self, params, lora, rollouts, capture):
        logprobs, *others = super().logprobs_and_features(params, lora, rollouts, capture)
        return watched(logprobs, rollouts.token_mask), *others


@jax.custom_vjp
def watched(logprobs, mask):
    return logprobs


def _backward(mask, cotangent):
    jax.debug.callback(lambda *seen: SEEN.append(tuple(map(np.asarray, seen))), cotangent, mask)
    return cotangent, None


watched.defvjp(lambda logprobs, mask: (logprobs, mask), _backward)


def params():
    result = MODEL.init(jax.random.key(0))
    return result | {"layers": jax.tree.map(lambda x: x * 6 if x.ndim == 3 else x, result["layers"]),
                     "embed": result["embed"] * 10}


def adapters():
    zero = lora_lib.init(jax.random.key(2), params(), rank=2, alpha=4.0)  # b is 0
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), zero)


def unrecorded(random: np.random.Generator) -> Rollouts:
    """The trajectories as they were sampled."""
    letters = np.array([[list(text.ljust(T, ".")) for text in pair] for pair in TURNS])
    prompt_mask, valid = np.ones((P, S), bool), np.ones((P, G), bool)
    prompt_mask[0, 0], prompt_mask[1, 2], valid[3, 1] = False, False, False
    return Rollouts(
        mask=(letters == "p") | (letters == "X"), valid=valid, role=np.vectorize(ROLES.get)(letters).astype(np.int8),
        tokens=random.integers(0, V, (P, G, T)).astype(np.int32), rewards=random.normal(size=(P, G)).astype(np.float32),
        prompt_tokens=random.integers(0, V, (P, S)).astype(np.int32), prompt_mask=prompt_mask)


@functools.cache
def batch() -> Rollouts:
    """The trajectories, off-policy by a bit; all that is recorded of tokens that are not trained is NaN."""
    random = np.random.default_rng(3)
    rollouts = unrecorded(random)
    near = np.asarray(jax.jit(logprobs)(params(), None, rollouts)[0])
    def recorded():
        return np.where(rollouts.token_mask, near + random.normal(0, 0.25, near.shape), np.nan)
    return rollouts.replace(**{name: recorded().astype(np.float32) for name in (
        "old_logprobs", "behavior_logprobs", "ref_logprobs")})


def advantages() -> np.ndarray:
    values = np.random.default_rng(4).normal(size=(P, G, T)).astype(np.float32)
    return np.where(batch().token_mask, values, np.nan)


def states(params, lora, rollouts) -> tuple[Any, Any]:
    """`(normed [P, G, T, D] before each token, streams [L, P, G, S + T, D])` from P * G rows `[prompt, completion]`."""
    P, G, T = rollouts.mask.shape
    def rows(x):
        return jnp.repeat(x, G, axis=0)
    tokens = jnp.concatenate([rows(rollouts.prompt_tokens), rollouts.tokens.reshape(P * G, T)], axis=1)
    there = rollouts.role != Role.PADDING
    mask = jnp.concatenate([rows(rollouts.prompt_mask), there.reshape(P * G, T)], axis=1)
    normed, _, streams = MODEL.hidden_states(params, tokens, mask, lora=lora, pool=lambda x: x)
    last = S - 1 - jnp.argmax(rows(rollouts.prompt_mask)[:, ::-1], axis=1)
    before = jnp.concatenate([last[:, None], jnp.broadcast_to(jnp.arange(S, S + T - 1), (P * G, T - 1))], axis=1)
    normed = jnp.take_along_axis(normed, before[..., None], axis=1)
    return normed.reshape(P, G, T, -1), streams.reshape(len(streams), P, G, S + T, -1)


def logprobs(params, lora, rollouts) -> tuple[Any, Any]:
    """Log-probs and entropies, NaN where nothing is trained."""
    logp = jax.nn.log_softmax(MODEL.logits(params, states(params, lora, rollouts)[0]) / POLICY.temperature)
    own = jnp.take_along_axis(logp, rollouts.tokens[..., None], axis=3)[..., 0]
    return tuple(jnp.where(rollouts.token_mask, x, jnp.nan) for x in (own, -(jnp.exp(logp) * logp).sum(-1)))


def gradient(objective, lora, rollouts, advantages):
    """Of the objective, by plain rows, with respect to the adapters or else to the parameters."""
    def loss(tree):
        result, _ = logprobs(*((tree, None) if lora is None else (params(), tree)), rollouts)
        return objective.update(result, rollouts, advantages, objective.init())[0]

    return jax.jit(jax.grad(loss))(params() if lora is None else lora)


def fresh_state(objective, lora=None, estimator=None):
    estimator = ESTIMATORS.make("grpo") if estimator is None else estimator
    return state_lib.create(params(), lora, GRADIENT, estimator, objective, jax.random.key(1))


def distance(result, wanted) -> float:
    """Largest difference of two trees, as a share of the largest number of each leaf of the second."""
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()), result, wanted)
    return max(jax.tree.leaves(apart))


CLIPPED = objectives.of("ppo_clip(clip_high=0.28, aggregation=seq_mean_token_mean) + kl(0.1)")
WHOLE = objectives.make("bapo")  # must see all of a mini-batch at once
