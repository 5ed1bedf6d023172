"""Sampling from a server that speaks OpenAI's format.

`client` asks it, `answers` checks what comes back, `server` publishes weights, `engine` has the contract of the slot engine.
"""
from jaxrl_llm.generation.external.client import Client, Fault, Refusal, ServerError
from jaxrl_llm.generation.external.engine import ExternalEngine, generate
from jaxrl_llm.generation.external.server import Mismatch, Server, Stale

__all__ = ["Client", "ExternalEngine", "Fault", "Mismatch", "Refusal", "Server", "ServerError", "Stale", "generate"]
