"""Sampling completions from a policy."""
from jaxrl_llm.generation.sampler import Completions, generate, row_keys
from jaxrl_llm.generation.sampling import Sampling

__all__ = ["Completions", "Sampling", "generate", "row_keys"]
