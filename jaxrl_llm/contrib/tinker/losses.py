"""Tinker's loss functions of per-token log-probs. A loss is the plain sum over tokens, so micro-batches simply add up.

Notation: p, the log-prob of the target under the adapter; q, that of the sampler (`logprobs`); A, `advantages`; w, `weights`;
r = exp(p - q); [low, high], the clip thresholds.
"""
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.tools.registry import one_of


class Loss(NamedTuple):
    """A loss function.

    Attributes:
      function: `(p f32[...], fields, settings) -> f32[...]`, the loss of each token before its weight.
      fields: per-token arrays that a datum must have beside `target_tokens`; `weights` is always optional, 1 by default.
      settings: names and defaults of `loss_fn_config`.
    """

    function: Callable[[jax.Array, Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]
    fields: tuple[str, ...] = ()
    settings: Mapping[str, float] = {}


def cross_entropy(p, fields, settings):
    """-p."""
    return -p


def importance_sampling(p, fields, settings):
    """-r A."""
    return -jnp.exp(p - fields["logprobs"]) * fields["advantages"]


def ppo(p, fields, settings):
    """-min(r A, clip(r, low, high) A) (arXiv 1707.06347)."""
    ratio, advantages = jnp.exp(p - fields["logprobs"]), fields["advantages"]
    return -jnp.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def cispo(p, fields, settings):
    """-sg(clip(r, low, high)) A p: every token keeps a gradient (arXiv 2506.13585)."""
    ratio = jnp.exp(p - fields["logprobs"])
    return -jax.lax.stop_gradient(_clipped(ratio, settings)) * fields["advantages"] * p


def dro(p, fields, settings):
    """-(A p - beta / 2 (p - q)^2) (arXiv 2405.19107)."""
    return -(fields["advantages"] * p - 0.5 * settings["beta"] * (p - fields["logprobs"]) ** 2)


def _clipped(ratio, settings):
    return jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


_SAMPLED = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(cross_entropy),
    "importance_sampling": Loss(importance_sampling, _SAMPLED),
    "ppo": Loss(ppo, _SAMPLED, _CLIP),
    "cispo": Loss(cispo, _SAMPLED, _CLIP),
    "dro": Loss(dro, _SAMPLED, {"beta": 0.05}),
}


def per_token(name: str, p, fields, settings):
    """`w l(p)`, f32 of the shape of `p`; exactly 0 where w is 0, whatever the other fields hold there."""
    weights = fields["weights"]
    counts = weights != 0
    safe = {key: jnp.where(counts, value, 0) for key, value in fields.items()}
    return jnp.where(counts, weights * LOSSES[name].function(jnp.where(counts, p, 0), safe, settings), 0)


def settings_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss, with defaults. Raises ValueError for an unknown loss or setting, or one that is not a number."""
    settings = dict(LOSSES[one_of("loss_fn", name, LOSSES)].settings)
    for key, value in given.items():
        if key not in settings:
            raise ValueError(f"loss_fn_config has {key!r}; {name} knows {', '.join(settings) or 'no settings'}")
        if isinstance(value, str) or math.isnan(value):
            raise ValueError(f"loss_fn_config[{key!r}]={value!r}; give a number")
        settings[key] = value
    return settings
