"""Tinker's losses are objectives of the catalogue: its own names are a table, every other name is the objective's.

An example is a prompt with one completion. Tinker's convention holds for all: the loss is the plain sum over tokens and
examples, each token times its `weights`, in place of the objective's aggregation. So micro-batches and calls simply add up.

Notation: p, the log-prob of the target under the adapter; q, that of the sampler (`logprobs`); A, `advantages`; r = exp(p - q).
"""
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives import Objective
from jaxrl_llm.objectives.base import OBJECTIVES
from jaxrl_llm.tools.memo import remembered
from jaxrl_llm.tools.registry import one_of

MARK = "sequence_ratio_mask"  # Tinker's name for the mask of the tokens of a sequence's ratio
WEIGHTS = "weights"
OF_TOKENS = {field.name for field in dataclasses.fields(Rollouts) if field.metadata.get("axes") == "PGT"}
_SUMMED = ("aggregation", "max_len")  # numbers of objectives that a sum does not have


class Loss(NamedTuple):
    """A loss function.

    Attributes:
      make: the objective with these settings.
      fields: per-token arrays that an example must have beside `target_tokens`.
      optional: those that it may have.
      settings: names and defaults of `loss_fn_config`.
      traced: settings are numbers that do not change which program is compiled.
    """

    make: Callable[[Mapping[str, Any]], Objective]
    fields: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ("weights",)
    settings: Mapping[str, Any] = {}
    traced: bool = True


def _clipped(name: str) -> Callable[[Mapping[str, Any]], Objective]:
    return lambda given: objectives.make(name, clip_low=1 - given["clip_low_threshold"],
                                         clip_high=given["clip_high_threshold"] - 1)


def _thresholds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


TINKER = {  # log-ratios are between -20 and 20, as everywhere in `objectives`
    # -p
    "cross_entropy": Loss(lambda given: objectives.make("reinforce"), ()),
    # -r A
    "importance_sampling": Loss(lambda given: objectives.make("ppo_clip", clip_low=1.0, clip_high=math.inf)),
    # -min(r A, clip(r, low, high) A), arXiv 1707.06347
    "ppo": Loss(_clipped("ppo_clip"), settings=_thresholds(0.8, 1.2)),
    # -sg(clip(r, low, high)) A p, arXiv 2506.13585
    "cispo": Loss(lambda given: objectives.make("cispo", min_ratio=given["clip_low_threshold"],
                                                max_ratio=given["clip_high_threshold"]), settings=_thresholds(0.0, 4.0)),
    # -(A p - beta / 2 (p - q)^2), arXiv 2405.19107
    "dro": Loss(lambda given: objectives.made([("reinforce", {}), ("kl", {"coef": given["beta"], "estimator": "k2",
                                                                          "against": "old"})]), settings={"beta": 0.05}),
    # as `ppo`, with the value of exp(mean of p - q over the marked tokens) for r on each of them, arXiv 2507.18071
    "gspo": Loss(_clipped("gspo_token"), optional=("weights", MARK), settings=_thresholds(1 - 3e-4, 1 + 4e-4)),
}
REFUSED = {"stable_reinforce": "its formula is not published, and it reads what Tinker's sampler records",
           "c3po": "it counts the tokens of a whole batch, and gradients of several calls add up here"}


def loss_of(name: str) -> Loss:
    """The loss of this name. Raises ValueError for an unknown one, and for one that reads what no example has."""
    if name in REFUSED:
        raise ValueError(f"loss_fn={name!r}: {REFUSED[name]}; train with loss_fn='importance_sampling'")
    one_of("loss_fn", name, [*TINKER, *OBJECTIVES])
    return TINKER[name] if name in TINKER else _of_catalogue(name)


@functools.cache
def _of_catalogue(name: str) -> Loss:
    made, numbers = _made(name, {}), OBJECTIVES.parameters(name)
    reads = dict.fromkeys(made.needs)
    unknown = [need for need in reads if need not in OF_TOKENS and not need.endswith("_logprobs")]
    if unknown:
        raise ValueError(f"loss_fn={name!r} reads {', '.join(unknown)}, which no example has: its loss_fn_inputs are numbers "
                         "of tokens")
    if made.whole_batch:
        raise ValueError(f"loss_fn={name!r} compares all examples of a batch, and gradients of several calls add up here")
    if jax.tree.leaves(made.init()):
        raise ValueError(f"loss_fn={name!r} keeps a state from update to update, which no call has")
    sampled = made.reads_old or bool(reads.keys() & {"behavior_logprobs", "old_logprobs"})
    further = tuple(need for need in reads if need not in ("behavior_logprobs", "old_logprobs"))
    required = ("logprobs", "advantages") if sampled else ("advantages",)
    optional = ("weights", MARK, "old_logprobs") if sampled else ("weights", MARK, "logprobs")
    settings = {key: one.default for key, one in numbers.items() if key not in _SUMMED}
    return Loss(functools.partial(_made, name), (*required, *further), optional, settings, traced=False)


def _made(name: str, numbers: Mapping[str, Any]) -> Objective:
    weighed = {"aggregation": "token_mean"} if "aggregation" in OBJECTIVES.parameters(name) else {}  # a sum replaces it
    return objectives.make(name, **weighed, **numbers)


def available() -> list[str]:
    """The names of all losses, Tinker's first."""
    def there(name):
        try:
            return bool(loss_of(name))
        except ValueError:
            return False
    return [*TINKER, *(name for name in objectives.names() if name not in TINKER and there(name))]


def settings_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a loss, with defaults. Raises ValueError for an unknown loss or setting, or one out of its range."""
    loss = loss_of(name)
    settings = dict(loss.settings)
    for key, value in given.items():
        if key not in settings:
            raise ValueError(f"loss_fn_config has {key!r}; {name} knows {', '.join(settings) or 'no settings'}")
        if loss.traced and isinstance(value, str) or not isinstance(value, str) and math.isnan(value):
            raise ValueError(f"loss_fn_config[{key!r}]={value!r}; give a number")
        settings[key] = value
    try:
        loss.make(settings)
    except ValueError as error:
        raise ValueError(f"loss_fn_config={dict(given)}: {error}") from None
    return settings


def summed(name: str, given: Mapping[str, Any]) -> tuple[Objective, dict[str, np.float32]]:
    """The objective of a loss as Tinker's plain sum, and its state: the settings that change no program.

    Its metrics `logprobs` and `losses` f32[P, G, T] are of each token. `extras["weights"]` f32[P, G, T] weigh tokens: the loss
    of a token with the weight 0 is 0, whatever the fields hold there. Raises ValueError as `settings_of` does.
    """
    settings = settings_of(name, given)
    if loss_of(name).traced:
        return _summed(name, ()), {key: np.float32(value) for key, value in settings.items()}
    return _summed(name, tuple(settings.items())), {}


@remembered(32)
def _summed(name: str, fixed: tuple[tuple[str, Any], ...]) -> Objective:
    loss = loss_of(name)

    def weights(rollouts):
        return {key: _plain(one, rollouts.extras[WEIGHTS])
                for key, one in loss.make({**loss.settings, **dict(fixed)}).weights(rollouts).items()}

    def update(logprobs, rollouts, advantages, state):
        made, share, there = loss.make({**state, **dict(fixed)}), rollouts.loss_weights, lax.stop_gradient(logprobs)

        def total(logprobs, share):
            return made.update(logprobs, rollouts.replace(loss_weights=share), advantages, made.init())[0]

        losses, mask = jnp.zeros(logprobs.shape), rollouts.token_mask
        for key, slope in jax.grad(total, argnums=1)(there, share).items():  # the loss is linear in the shares
            part = slope * share[key]
            losses += part if part.ndim == 3 else masked.to_tokens(part / jnp.maximum(rollouts.lengths, 1), mask)
        return total(logprobs, share), ({"logprobs": there, "losses": losses}, state)

    return Objective(tuple, update, weights)


def _plain(share: jax.Array, weights: jax.Array) -> jax.Array:
    """The weights of examples in place of an objective's shares, 0 where these are: of tokens, or 1 for a whole example."""
    return jnp.where(share != 0, weights if share.ndim == 3 else jnp.any(weights != 0, axis=-1), 0.0)
