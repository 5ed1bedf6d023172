"""Who is sampled next, and from whom is learned: one file each.

A topology is asked again and again, with the forest of what has been sampled, until it wants no more.
"""
from jaxrl_llm.topologies.base import Plan, Topology
from jaxrl_llm.topologies.budgets import budgets
from jaxrl_llm.topologies.refill import refill
from jaxrl_llm.topologies.rounds import rounds
from jaxrl_llm.topologies.single import single

__all__ = ["Plan", "Topology", "budgets", "refill", "rounds", "single"]
