"""Value models: what a rollout was expected to earn. They know nothing of the loop.

Plain arrays go in everywhere but in `critic` and `encoder`, which wrap a model.
"""
from jaxrl_llm.values.base import Value
from jaxrl_llm.values.poise import PoiseState, poise

__all__ = ["PoiseState", "Value", "poise"]
