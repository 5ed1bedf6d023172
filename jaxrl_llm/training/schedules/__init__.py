"""Schedules of sampling and learning; each file of this folder registers its own."""
from jaxrl_llm import registry
from jaxrl_llm.training.schedules.base import SCHEDULES, Schedule, Step, make, schedule

registry.discover(__name__, __path__)
__all__ = ["SCHEDULES", "Schedule", "Step", "make", "schedule"]
