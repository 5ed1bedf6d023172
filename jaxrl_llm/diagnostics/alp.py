"""How robust a trained policy is to noise, layer by layer: in the layers' inputs, and in their weights."""
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.diagnostics.base import Diagnostic, Result, diagnostic, single
from jaxrl_llm.diagnostics.rows import logprobs, plain, sampled
from jaxrl_llm.evaluation import alp as noise
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.runs.trained import Trained, trained
from jaxrl_llm.sampling import heldout
from jaxrl_llm.tools.figures import COLORS

ALL = "all"


@diagnostic
def alp(*, problems: int = 64, scales: Sequence[float] = (0.01, 0.03, 0.1, 0.3), seed: int = 0) -> Diagnostic:
    """Ratios and held-out score under Gaussian noise in each layer and in all of them (arXiv 2603.19470).

    Two kinds of noise. States: h + sigma eps before each layer, with sigma = scale x root mean square of h there; completions
    that the policy sampled without noise get log-probs with it. Weights: the same relative noise in the matrices of a layer,
    under which held-out problems are sampled again.

    Args:
      problems: held-out problems, a group of completions each.
      scales: size of the noise relative to what it is added to.
    """
    def measure(folders: Sequence[Path]) -> Result:
        run = trained(single(folders))
        _, rollouts = sampled(run, problems, seed)
        layers = [*map(str, range(run.policy.model.config.num_layers)), ALL]
        states = under_noisy_states(run, rollouts, scales, seed)
        scores = under_noisy_weights(run, problems, scales, seed)
        rows = [{"layer": layer, "scale": scale, **states["numbers"][layer][i], "score": scores["scores"][layer][i]}
                for layer in layers for i, scale in enumerate(scales)]
        return {"run": str(folders[0]), "step": run.step, "scales": list(scales), "layers": layers, **states, **scores,
                "tables": {f"Noise at step {run.step}; held-out score without: {scores['score']:.3f}": rows}}

    return Diagnostic(measure, draw, panels=3, width=14)


def under_noisy_states(run: Trained, rollouts, scales: Sequence[float], seed: int) -> Result:
    """`numbers[layer][i]` for each scale, and `rms[layer]` of what each layer reads."""
    rows, T = plain(rollouts), rollouts.mask.shape[2]
    count, mask = run.policy.model.config.num_layers, np.asarray(rollouts.mask).reshape(-1, T)
    sampling, rms = _scored(run.policy, run.params, run.lora, rows, jnp.zeros(count), jax.random.key(seed))
    sampling, rms = np.asarray(sampling), np.asarray(rms)
    numbers: dict[str, list] = {}
    for layer in (*range(count), ALL):
        numbers[str(layer)] = []
        for scale in scales:
            chosen = np.ones(count) if layer == ALL else np.arange(count) == layer
            perturbed, _ = _scored(run.policy, run.params, run.lora, rows, jnp.asarray(scale * rms * chosen),
                                   jax.random.key(seed))
            numbers[str(layer)].append(_summary(np.asarray(perturbed), sampling, mask))
    return {"numbers": numbers, "rms": rms.tolist()}


@functools.partial(jax.jit, static_argnums=0)
def _scored(policy: Policy, params, lora, rows, sigma, key):
    """Log-probs f32[B, T] with noise of `sigma f32[L]` before each layer, and the root mean square f32[L] of what it reads."""
    def perturb(x, layer):
        drawn = jax.random.normal(jax.random.fold_in(key, layer), x.shape, x.dtype)
        return x + sigma[layer].astype(x.dtype) * drawn

    def square(x):
        return jnp.where(rows.mask[..., None], x.astype(jnp.float32) ** 2, 0).sum() / (rows.mask.sum() * x.shape[-1])

    noisy, after = logprobs(policy, params, lora, rows, perturb, square)
    first = square(policy.model.embed(params, rows.tokens))
    return noisy, jnp.sqrt(jnp.concatenate([first[None], after[:-1]]))


def _summary(perturbed: np.ndarray, sampling: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    numbers = {"kl": noise.divergence(perturbed, sampling, mask)}
    for level in ("token", "sequence"):
        low, high = noise.tails(noise.ratios(perturbed, sampling, mask, level), mask)
        numbers |= {f"{level} ratio, low": low, f"{level} ratio, high": high}
    return numbers


def under_noisy_weights(run: Trained, problems: int, scales: Sequence[float], seed: int) -> Result:
    """`scores[layer][i]`: held-out score for each scale, and `score` without noise; the same keys draw all completions."""
    def score(params):
        return heldout.evaluate(run.source, params, run.lora, problems=problems, key=jax.random.key(seed)).score.mean

    layers = [*map(str, range(run.policy.model.config.num_layers)), ALL]
    return {"score": score(run.params), "scores": {
        layer: [score(with_noise(run.params, layer, scale, jax.random.key(seed))) for scale in scales] for layer in layers}}


def with_noise(params: Any, layer: str, scale: float, key: jax.Array) -> Any:
    """The parameters with `scale x root mean square` of each matrix of a layer, or of all, as Gaussian noise in it."""
    leaves, tree = jax.tree.flatten(params["layers"])
    count = len(leaves[0])
    chosen = jnp.ones(count, bool) if layer == ALL else jnp.arange(count) == int(layer)

    def noisy(number, w):
        if w.ndim < 3:  # norms and biases, stacked over the layers, are not matrices
            return w
        axes = tuple(range(1, w.ndim))
        size = scale * jnp.sqrt((w.astype(jnp.float32) ** 2).mean(axis=axes, keepdims=True))
        drawn = jax.random.normal(jax.random.fold_in(key, number), w.shape)
        return (w + jnp.where(chosen.reshape(-1, *[1] * (w.ndim - 1)), size * drawn, 0)).astype(w.dtype)

    return params | {"layers": jax.tree.unflatten(tree, [noisy(i, w) for i, w in enumerate(leaves)])}


def draw(results, axes) -> None:
    """KL and tails of sequence ratios under noise in states, score under noise in weights; a line for each layer."""
    for number, layer in enumerate(results["layers"]):
        style = {"color": "0.2", "linestyle": "--"} if layer == ALL else {"color": COLORS[number % len(COLORS)]}
        label, numbers = (f"layer {layer}" if layer != ALL else "all layers"), results["numbers"][layer]
        axes[0].plot(results["scales"], [one["kl"] for one in numbers], "o", label=label, **{"linestyle": "-", **style})
        for side in ("low", "high"):
            axes[1].plot(results["scales"], [one[f"sequence ratio, {side}"] for one in numbers], "o",
                         **{"linestyle": "-", **style})
        axes[2].plot(results["scales"], results["scores"][layer], "o", **{"linestyle": "-", **style})
    axes[2].axhline(results["score"], color="0.6", linewidth=1)
    titles = ("States: KL, nats per token", "States: 0.1% and 99.9% of sequence ratios", "Weights: held-out score")
    for panel, title in zip(axes, titles):
        panel.set_xscale("log")
        panel.set_xlabel("noise, relative to its place")
        panel.set_title(title)
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend()
