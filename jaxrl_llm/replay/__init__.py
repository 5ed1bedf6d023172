"""Replay rules: which finished rollouts are stored, and which of them later batches train on again, one rule per file.

    rule = replay.make("latest_success", success=0.5)

A row of the catalogue names its rule, and a run by name then keeps a buffer (`replay.buffer`).
"""
from jaxrl_llm.replay.base import RULES, Replay, rule
from jaxrl_llm.tools import registry

registry.discover(__name__, __path__)


def names() -> list[str]:
    """All rules, sorted."""
    return sorted(RULES)


def make(slug: str, **hyper) -> Replay:
    """The rule of that name; ValueError for unknown names and keywords."""
    return RULES.make(slug, **hyper)


__all__ = ["Replay", "make", "names", "rule"]
