"""Value models: predictions of what a rollout earns. They do not depend on the training loop.

All of them take plain arrays, except `critic` and `encoder`, which wrap a model.
"""
from jaxrl_llm.values.base import Value
from jaxrl_llm.values.poise import PoiseState, poise

__all__ = ["PoiseState", "Value", "poise"]
