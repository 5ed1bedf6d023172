"""Verifiers: completions and reference answers in, rewards out. `make` one by name, `combine` several by weight."""
import dataclasses
from collections.abc import Sequence

from jaxrl_llm.rewards.base import REWARDS, BatchOutput, Combined, Reward, RewardError, Scores, reward
from jaxrl_llm.rewards.by_task import ByTask
from jaxrl_llm.tools import registry

__all__ = ["REWARDS", "BatchOutput", "ByTask", "Combined", "Reward", "RewardError", "Scores", "combine", "make", "reward"]

registry.discover(__name__, __path__)


def make(name: str, **options) -> Reward:
    """The reward of that name, or of your own "module:function"; ValueError for an unknown name or option, with the nearest."""
    return REWARDS.make(name, **options)


def combine(parts: Sequence[Reward | str | tuple[str | Reward, float]], on_error: str = "raise",
            deadline: float | None = None) -> Combined:
    """`combine([("last_number", 1.0), (make("format", pattern=...), 0.1)])`: a callable on lists that gives `Scores`.

    A part is a name, a Reward, or a pair of one of these and its weight. `deadline`: seconds per reward and batch, after
    which a RewardError is raised. Raises ValueError for no parts, two of one name, or an unknown `on_error`.
    """
    registry.one_of("on_error", on_error, ("raise", "zero"))
    rewards = tuple(_weighted(part) for part in parts)
    names = [one.name for one in rewards]
    if not rewards or len(set(names)) < len(names):
        raise ValueError(f"combine needs one or more rewards of different names, got {names}")
    return Combined(rewards, on_error, deadline)


def _weighted(part: Reward | str | tuple[str | Reward, float]) -> Reward:
    named, weight = part if isinstance(part, tuple) else (part, None)
    made = make(named) if isinstance(named, str) else named
    return made if weight is None else dataclasses.replace(made, weight=weight)
