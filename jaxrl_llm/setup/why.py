"""What a run is composed of, and everything that stands against it: unmet needs and conflicts, all at once.

A part declares by itself what it needs and what it cannot be together with (`tools.registry.Kind`); rooms whose parts are in
every run have `CONFLICTS` of their own. What the declarations read is a mapping from names to values, see `setup.values`.
"""
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import environments, replay, rewards, topologies
from jaxrl_llm.advantages import alike
from jaxrl_llm.control import knobs
from jaxrl_llm.engines import sampling as sampling_lib
from jaxrl_llm.learning import optimizers
from jaxrl_llm.models import lora
from jaxrl_llm.replay import pool
from jaxrl_llm.sampling import given
from jaxrl_llm.setup.parts import Parts
from jaxrl_llm.setup.readers import readers
from jaxrl_llm.setup.unmet import unable, unmet, unobserved, unstaged, untaken
from jaxrl_llm.setup.values import Around, kinds_of, values_of
from jaxrl_llm.tools.registry import Conflict
from jaxrl_llm.values import critic

ROOMS = {"the sampler": sampling_lib, "the optimiser": optimizers, "adapters": lora, "critics": critic, "a pool": pool,
         "given texts": given,
         "topologies": topologies.base, "replay": replay.base, "environments": environments.base, "rewards": rewards.base,
         "estimators": alike}


def check(config: ConfigDict, made: Parts, around: Around = Around()) -> None:
    """Raises one error with all lines of `against`, if there are any.

    It is a NotImplementedError if a need is not met, else a ValueError.
    """
    lacks, lines = unmet(made), against(config, made, around)
    if not lines:
        return
    text = lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} things stand against this run:", *(
        f"- {line}" for line in lines)])
    if lacks:
        raise NotImplementedError(f"{text}. Parts can be used from your own loop; `python -m jaxrl_llm.methods` lists the "
                                  "other methods")
    raise ValueError(text)


def against(config: ConfigDict, made: Parts, around: Around = Around()) -> list[str]:
    """All that stands against a run, a line each; empty: it can begin."""
    unread = knobs.unread(made.controls.by_name, readers(config, made))
    return [*unmet(made), *unable(config, made), *unread, *unobserved(config, made, around),
            *untaken(config, made, around), *unstaged(config, made, around), *conflicting(config, made, around)]


def conflicting(config: ConfigDict, made: Parts, around: Around = Around()) -> list[str]:
    """A line for each conflict of the parts with each other, with the settings and with what is around them."""
    values = values_of(config, made, around)
    return list(dict.fromkeys(line for part, conflicts in declared(config, made) for conflict in conflicts
                              for line in _lines(part, conflict, values)))


def _lines(part: str, conflict: Conflict, values: Mapping[str, Any]) -> Iterable[str]:
    """The line of a conflict, if it is there."""
    if not {*conflict.of} <= {*values}:
        return
    given, why = [values[name] for name in conflict.of], conflict.why
    if callable(why):
        reason = why(*given).replace("{", "{{").replace("}", "}}")
    else:
        reason = why if (all(given) if conflict.when is None else conflict.when(*given)) else ""
    if reason:
        yield f"{reason}; {conflict.do}".format(*given, part=part, method=values["method"])


def declared(config: ConfigDict, made: Parts) -> Iterable[tuple[str, tuple[Conflict, ...]]]:
    """`(part, conflicts)` of all parts of a run, and of the rooms whose parts every run has."""
    for (what, name), kind in kinds_of(config, made).items():
        yield f"{what} {name!r}", kind.conflicts
    for what, room in ROOMS.items():
        yield what, room.CONFLICTS
