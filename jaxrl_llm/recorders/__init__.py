"""Recorders: measurements on rollouts before credit assignment and learning, one file each."""
from jaxrl_llm.recorders.base import Recorder
from jaxrl_llm.recorders.features import features
from jaxrl_llm.recorders.gradients import gradients
from jaxrl_llm.recorders.greedy import greedy
from jaxrl_llm.recorders.old import old
from jaxrl_llm.recorders.reference import reference
from jaxrl_llm.recorders.teacher import base_model, teacher
from jaxrl_llm.recorders.turn_values import turn_values
from jaxrl_llm.recorders.values import values

__all__ = ["Recorder", "base_model", "features", "gradients", "greedy", "old", "reference", "teacher", "turn_values", "values"]
