"""Sampling from a server that speaks OpenAI's format: `client` asks it, `engine` has the contract of the slot engine."""
from jaxrl_llm.generation.external.client import Client, Fault, Refusal, ServerError
from jaxrl_llm.generation.external.engine import ExternalEngine, engine_for, generate
from jaxrl_llm.generation.external.server import Mismatch, Server

__all__ = ["Client", "ExternalEngine", "Fault", "Mismatch", "Refusal", "Server", "ServerError", "engine_for", "generate"]
