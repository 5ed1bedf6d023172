"""Recorders: measurements on rollouts before credit assignment and learning, one file each.

A run makes those that provide what its method needs (`asked`, `make`); `recorders/base.py` shows how to add one.
"""
from jaxrl_llm.recorders.base import RECORDERS, Context, Recorder, asked, make, named, recordable, recorder
from jaxrl_llm.recorders.features import features
from jaxrl_llm.recorders.gradients import gradients
from jaxrl_llm.recorders.greedy import greedy
from jaxrl_llm.recorders.old import old
from jaxrl_llm.recorders.reference import reference
from jaxrl_llm.recorders.teacher import base_model, teacher
from jaxrl_llm.recorders.turn_values import turn_values
from jaxrl_llm.recorders.values import values
from jaxrl_llm.tools import registry

registry.discover(__name__, __path__)

__all__ = ["RECORDERS", "Context", "Recorder", "asked", "base_model", "features", "gradients", "greedy", "make", "named", "old",
           "recordable", "recorder", "reference", "teacher", "turn_values", "values"]
