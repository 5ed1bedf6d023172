"""Searches and queries among the calls of a trajectory, each new or repeated (RAPO, arXiv 2509.24107)."""
from collections.abc import Collection, Mapping, Sequence

from jaxrl_llm.environments.tools import CALLS, Call, identity
from jaxrl_llm.rewards.call_kinds import COUNTS
from jaxrl_llm.tools import registry

KINDS = {"search": "searches", "query": "queries"}  # kind of a tool -> the fact that counts its calls
FACTS = dict.fromkeys(COUNTS, "count")


def check(kinds: Mapping[str, str], tools: Collection[str]) -> None:
    """Raises ValueError for a tool that is not there, and for another kind than `KINDS`."""
    for tool, kind in kinds.items():
        registry.one_of("tool in kinds", tool, tools)
        registry.one_of(f"kind of the tool {tool!r}", kind, KINDS)


def counted(calls: Sequence[Call], kinds: Mapping[str, str], made: set[str]) -> dict[str, int]:
    """The `FACTS` of a message; `made` are the trajectory's earlier calls, to which its new ones are added.

    A call of a tool without a kind, a malformed call and a call beyond the limit of a message count as nothing. A call is
    repeated if an equal call of the trajectory has come before: a judge of redundancy finds similar calls too, and a limit of
    verifications of each claim is what repeats exceed.
    """
    facts = dict.fromkeys(FACTS, 0)
    for call in calls[:CALLS]:
        if call.error or call.name not in kinds:
            continue
        key = identity([call])
        again = key is not None and key in made
        facts[KINDS[kinds[call.name]] + "_again" * again] += 1
        made |= set() if key is None else {key}
    return facts
