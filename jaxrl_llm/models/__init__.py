"""Decoder-only policies of the families in `models.families`, their weights and their adapters."""
from jaxrl_llm.models import lora, weights
from jaxrl_llm.models.config import Experts, ModelConfig, RopeScaling
from jaxrl_llm.models.transformer import CompletionCache, PromptCache, Transformer

__all__ = ["CompletionCache", "Experts", "ModelConfig", "PromptCache", "RopeScaling", "Transformer", "lora", "weights"]
