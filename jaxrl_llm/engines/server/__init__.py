"""Sampling from a server that speaks OpenAI's format.

`client` sends requests, `answers` checks the answers, `server` publishes weights, `engine` has the slot engine's contract.
"""
from jaxrl_llm.engines.server.client import Client, Fault, Refusal, ServerError
from jaxrl_llm.engines.server.engine import ExternalEngine
from jaxrl_llm.engines.server.server import Mismatch, Server, Stale

__all__ = ["Client", "ExternalEngine", "Fault", "Mismatch", "Refusal", "Server", "ServerError", "Stale"]
