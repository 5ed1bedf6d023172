"""Token columns that the engines of this process measure while they decode, beside log-probs, entropies and versions.

To add one, write a function from the model's configuration to a `Measure` under `@measure`, in this file or in one of your own:

    @measure("rank")
    def rank(config: ModelConfig) -> Measure:
        \"\"\"The number of tokens that were likelier.\"\"\"
        def of_draw(logits, tokens):
            return (logits > jnp.take_along_axis(logits, tokens[:, None], axis=1)).sum(-1)

        return Measure(Column("rank", "token", np.int32, fill=-1, to="extras"), of_draw=of_draw)

A run whose method needs `rank` measures it, and has `extras["rank"]` i32[P, G, T]; other runs compile nothing for it.
"""
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.columns import Column
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.tools import registry
from jaxrl_llm.tools.registry import Conflict

ALWAYS = frozenset(("logprobs", "entropies", "version"))  # what the engines of this process provide of every model


class Measure(NamedTuple):
    """A token column and how it is computed, by one of two functions.

    of_draw: `(logits f32[n, V], tokens i32[n]) -> [n, ...]`, of the logits that tokens were drawn from.
    of_router: `(routing) -> [..., ...]`, of the pass that reads a token through one layer, see `models.moe.Router`; the column
      has an axis of layers before the other trailing ones. Tokens that no engine reads, such as the last one, have no entry.
    """

    column: Column
    of_draw: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    of_router: Callable[[Any], jax.Array] | None = None


MEASURES = registry.PartTable("measure", Measure, keywords=False)


def measure(name: str, **facts: Any) -> Callable:
    """Enters a function from a model's configuration to a `Measure`, or None if the model has nothing to measure."""
    return MEASURES.enter(name=name, **facts)


DENSE = Conflict(("model",), "method {method!r} reads or replays the experts of a mixture, and this model is dense",
                 "leave routing=free in config.objective, or take a mixture of experts", lambda model: model.experts is None)


@measure("routes", conflicts=(DENSE,))
def routes(config: ModelConfig) -> Measure | None:
    """The experts that a mixture routed each token to, i16[layers, k]."""
    if config.experts is None:
        return None
    column = Column("routes", "token", np.int16, (config.num_layers, config.experts.per_token), fill=-1, to="extras")
    return Measure(column, of_router=lambda routing: routing["experts"])


def provided(config: ModelConfig) -> frozenset[str]:
    """Names of the token columns that the engines of this process provide of a model."""
    return ALWAYS | {name for name, kind in MEASURES.items() if kind.make(config) is not None}


def of(names: Sequence[str], config: ModelConfig) -> list[Measure]:
    """The measures of these names; ValueError for one that engines do not provide of this model."""
    made = [MEASURES[name].make(config) if name in MEASURES else None for name in names]
    if missing := [name for name, one in zip(names, made) if one is None]:
        raise ValueError(f"the engine does not provide the token column {missing[0]!r} of this model; it provides "
                         f"{', '.join(sorted(provided(config)))}")
    return [one for one in made if one is not None]


def columns_of(names: Sequence[str], config: ModelConfig) -> tuple[Column, ...]:
    """The declarations of those of these columns that engines provide of this model."""
    return tuple(one.column for one in of([name for name in names if name in provided(config)], config))


def tally(names: Sequence[str], config: ModelConfig) -> Callable | None:
    """What is kept of a router's output, by name; None if nothing is."""
    chosen = [one for one in of(names, config) if one.of_router is not None]
    if not chosen:
        return None
    return lambda routing: {one.column.name: one.of_router(routing).astype(one.column.dtype) for one in chosen}


def drawn(names: Sequence[str], config: ModelConfig, logits, tokens, read) -> dict[str, jax.Array]:
    """The columns of a decode step, `[n, ...]` each; those of routers, `read [n, ...]`, are still of the token before.

    `read` None: no token was read, as the prompt alone precedes the first one.
    """
    made: dict[str, jax.Array] = {}
    for one in of(names, config):
        column = one.column
        if one.of_draw is not None:
            made[column.name] = one.of_draw(logits, tokens).astype(column.dtype)
        else:
            made[column.name] = jnp.full((len(tokens), *column.trailing), column.fill, column.dtype) if read is None else (
                read[column.name])
    return made


def of_node(chosen: Sequence[Measure], entries: Sequence[Sequence[Any]]) -> dict[str, np.ndarray]:
    """The columns `[n, ...]` of n tokens drawn one after another, from the `entries` of their steps, as `drawn` has them.

    Each entry has a value for each of the `chosen` measures.
    """
    made = {}
    for place, one in enumerate(chosen):
        values, out = [entry[place] for entry in entries], one.column.filled(len(entries))
        if one.of_router is not None:
            values = values[1:]
        if values:
            out[:len(values)] = values
        made[one.column.name] = out
    return made


def entries_of(chosen: Sequence[Measure], columns: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """The columns of a node as `of_node` reads them: for each measure a list of the entries of n steps."""
    made = []
    for one in chosen:
        values = [*columns[one.column.name]]
        made.append(values if one.of_router is None else values[:1] + values[:-1])  # a step routes the token before its draw
    return made


def settled(names: Sequence[str], config: ModelConfig, columns: dict[str, jax.Array], mask) -> dict[str, jax.Array]:
    """The columns `[..., T, ...]` of a whole sampling: those of routers moved to the tokens that were read, the rest filled.

    `mask bool[..., T]`: tokens that were drawn.
    """
    def with_fill(column, values, known):
        known = known.reshape(known.shape + (1,) * len(column.trailing))
        return jnp.where(known, values, jnp.asarray(column.fill, column.dtype))

    made, axis = {}, mask.ndim - 1
    later = jnp.concatenate([mask[..., 1:], jnp.zeros_like(mask[..., :1])], axis=-1)
    for one in of(names, config):
        values = columns[one.column.name]
        if one.of_router is not None:
            values, known = jnp.roll(values, -1, axis), later
        else:
            known = mask
        made[one.column.name] = with_fill(one.column, values, known)
    return made
