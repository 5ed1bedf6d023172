"""The position of a source: where it is in its data, and what its topology and its stages remember."""
import copy
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.forest import Forest
from jaxrl_llm.replay import buffer as buffers
from jaxrl_llm.sampling.stages.base import Origin
from jaxrl_llm.topologies import Topology
from jaxrl_llm.topologies.base import recall, remembered


def position(source: Origin, topology: Topology) -> dict[str, Any]:
    """The position of a source with this topology; a checkpoint stores its `jsonable` form."""
    kept = {} if topology.memory is None else {"topology": remembered(topology)}
    return {"data": source.data.get_state(), "next_uid": source.next_uid, **kept, **source.memory}


def continued(source: Origin, topology: Topology, position: Mapping[str, Any]) -> None:
    """Lets a source continue from this position, or from its `jsonable` form."""
    source.data.set_state(position["data"])
    source.next_uid = position["next_uid"]
    recall(topology, copy.deepcopy(position.get("topology")))
    for one in [stage.memory for stage in source.stages if stage.memory is not None]:
        if (stored := position.get(one.name)) is not None:
            source.memory[one.name] = stored if isinstance(stored, Forest) else one.decode(stored, source)


def jsonable(position: Mapping[str, Any]) -> dict[str, Any]:
    """The position of a source as JSON."""
    return {name: buffers.encode(part) if isinstance(part, Forest) else part for name, part in position.items()}
