"""Value models: what a rollout was expected to earn. They work on plain arrays and know nothing of models or the loop."""
from jaxrl_llm.values.base import Value
from jaxrl_llm.values.poise import PoiseState, poise

__all__ = ["PoiseState", "Value", "poise"]
