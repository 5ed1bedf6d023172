"""The choice of an engine for a run."""
from collections.abc import Mapping

from jaxrl_llm import engines
from jaxrl_llm.engines import server as external
from jaxrl_llm.engines.base import CAN, ENGINES, EngineKind, Wanted, check_can, check_provides, lacking
from jaxrl_llm.tools import registry

registry.discover(engines.__name__, engines.__path__)
AUTO = ("scan", "slots")  # from which "auto" takes the faster one
FASTER_IN_SLOTS = 4  # from this number of parts of a batch on the slot engine is faster, see the table of docs/guides/engine.md


def choose(name: str, run: Wanted, wanted: Mapping[str, str]) -> EngineKind:
    """The engine that `sampling.engine` names, or the server; `wanted`: what it must do of `base.CAN`, and what for.

    "auto" is the faster of the two engines of this process, or the one that does what is wanted. Raises ValueError for an
    unknown name, for a name beside a server, and for an engine that lacks something.
    """
    if lines := unable(name, run.server is not None, wanted):
        raise ValueError("\n".join(lines))
    run = run._replace(wants=frozenset(wanted))
    if run.server is not None:
        kind = external.engine.kind(run)
    elif name != "auto":
        kind = ENGINES.make(name, run=run)
    else:
        able = [one for one in AUTO if {*ENGINES[one].provides} >= run.wants]
        kind = ENGINES[able[-1] if len(able) > 1 and faster_in_slots(run) else able[0]].make(run)
    check_can(kind, wanted)
    check_provides(kind, run.columns)
    return kind


def unable(name: str, at_server: bool, wanted: Mapping[str, str]) -> list[str]:
    """A line for each ability that is wanted and that the engine which `sampling.engine` names, or the server, lacks."""
    if at_server and name != "auto":
        return [f"sampling.engine={name!r} samples in this process, and server.url names a server that samples; set "
                "sampling.engine='auto', or server.url=''"]
    if at_server:
        return lacking("server", external.engine.CAN, wanted)
    if name != "auto":
        can = ENGINES.find(name).provides
        return lacking(name, can, wanted) if can else []  # your own says what it can once it is made
    if any({*ENGINES[one].provides} >= wanted.keys() for one in AUTO):
        return []
    needs = "; ".join(f"{why} needs an engine that {CAN[what]}" for what, why in wanted.items())
    return [f"{needs}, and no engine of this process does all of that; leave something of it out"]


def faster_in_slots(run: Wanted) -> bool:
    """Whether the slot engine samples whole batches of single turns faster, see docs/guides/engine.md.

    It does on one CPU, the only kind of device that was measured, if a batch comes in `FASTER_IN_SLOTS` parts or more, and
    completions may stop early and be at least as long as prompts, whose copies fill its caches.
    """
    devices = run.mesh.devices.flatten()
    return (len(devices) == 1 and devices[0].platform == "cpu" and bool(run.stop_ids) and run.parts >= FASTER_IN_SLOTS
            and run.prompt_tokens <= run.max_tokens)
