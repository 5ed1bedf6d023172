"""Sampling completions from a policy."""
from jaxrl_llm.engines.sampler import Completions, generate, row_keys
from jaxrl_llm.engines.sampling import Sampling

__all__ = ["Completions", "Sampling", "generate", "row_keys"]
