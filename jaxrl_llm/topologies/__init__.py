"""Topologies decide what is sampled next and which prompts are trained on; one file each.

A topology is called repeatedly with the forest of all samples so far until it requests no more; its plans are made of `acts`. A
run makes the one that its method names or implies (`chosen`, `make`); `topologies/base.py` shows how to add one. The `rules`
decide how many further rollouts prompts get in its rounds:

    rule = topologies.make_rule("dars", weighting="hardness")

`experts` and `adhint` wrap another topology, and let completions begin with traces of their problems.
"""
from collections.abc import Iterable

from jaxrl_llm.tools import registry
from jaxrl_llm.topologies.acts import Act, Begin, BeginPart, FromTrace, Stop, groups
from jaxrl_llm.topologies.adhint import adhint
from jaxrl_llm.topologies.base import TOPOLOGIES, Plan, Topology, chosen, implied, make, plants, topology
from jaxrl_llm.topologies.budgets import budgets
from jaxrl_llm.topologies.experts import experts
from jaxrl_llm.topologies.narrowed import narrowed
from jaxrl_llm.topologies.oracle import oracle
from jaxrl_llm.topologies.refill import refill
from jaxrl_llm.topologies.rounds import by_rule, rounds
from jaxrl_llm.topologies.rules import RULES, Rule, rule
from jaxrl_llm.topologies.single import single
from jaxrl_llm.topologies.sized import sized

registry.discover(__name__, __path__)


def rule_names() -> list[str]:
    """All allocation rules, sorted."""
    return sorted(RULES)


def make_rule(slug: str, **hyper) -> Rule:
    """The allocation rule of that name; ValueError for unknown names and keywords."""
    return RULES.make(slug, **hyper)


def provided(names: Iterable[str], there: Iterable[str]) -> set[str]:
    """The fields that the named topologies provide, and those that a run with the parts that are `there` implies."""
    kinds = [*implied(there).values(), *map(TOPOLOGIES.find, names)]
    return {field for kind in kinds for field in kind.provides}


__all__ = ["RULES", "TOPOLOGIES", "Act", "Begin", "BeginPart", "FromTrace", "Plan", "Rule", "Stop", "Topology", "adhint",
           "budgets", "by_rule", "chosen", "experts", "groups", "implied", "make", "make_rule", "narrowed", "oracle",
           "plants", "provided", "refill", "rounds", "rule", "rule_names", "single", "sized", "topology"]
