"""Schedules of sampling and learning; each file of this folder registers its own."""
from jaxrl_llm.learning.schedules.base import SCHEDULES, Schedule, Step, make, schedule
from jaxrl_llm.tools import registry

registry.discover(__name__, __path__)
__all__ = ["SCHEDULES", "Schedule", "Step", "make", "schedule"]
