"""Environments of gymnasium whose observations or renderings are text (arXiv 2407.17032)."""
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.words import last_word
from jaxrl_llm.tasks.base import Problem, optional, seeded

_COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")


@dataclasses.dataclass
class GymnasiumEpisode:
    """An environment of gymnasium, how many messages the policy may still send, and its last observation."""

    inside: Any
    left: int
    seen: Any


@environment
def gymnasium_text(*, env_id: str, options: Mapping[str, Any] | None = None, actions: Sequence[str] | None = None,
                   rules: str = "", turns: int = 100, problems: int = 1000, heldout: int = 200,
                   returns: tuple[float, float] = (-np.inf, np.inf)) -> Environment:
    """`gymnasium.make(env_id, **options)` with text observations (a Text space, or a rendering in the mode "ansi").

    `actions` are the words for a Discrete space, in its order (default: numbers); the last word in a message is
    the action, whatever its case.
    Text spaces take the message unchanged. Highlighted parts of a rendering are in square brackets. A problem is a seed of
    `reset`; chance during the trajectory comes from the key. `returns`, the lowest and highest return, are needed for training.
    Raises ValueError without gymnasium, or for another kind of environment.
    """
    gymnasium = optional("gymnasium", "environments")
    make = _maker(gymnasium, env_id, options or {})
    probe = make()
    words = _words(gymnasium, probe.action_space, actions, env_id)
    asked = f"{rules} Answer with one of: {', '.join(words)}.".strip() if words else rules

    def reset(problem: Problem, key: int) -> tuple[GymnasiumEpisode, list[Message]]:
        inside = make()
        seen, _ = inside.reset(seed=problem.extra["seed"])
        inside.unwrapped.np_random = np.random.default_rng(key)
        return GymnasiumEpisode(inside, turns, seen), [{"role": "user", "content": f"{asked}\n\n{_text(inside, seen)}".strip()}]

    return Environment(
        name=env_id, task=seeded(f"gymnasium/{env_id}", asked or env_id, problems, heldout), reset=reset,
        step=functools.partial(_step, words=words), returns=returns, choices=(lambda state: words) if words else None)


def _step(state: GymnasiumEpisode, message: Message, *, words: Sequence[str]) -> Turn:
    state.left -= 1
    action: Any = message["content"]
    info: dict[str, Any] = {}
    if words:
        action = last_word(words, action)
        info |= {"state": _identity(state.seen), "action": words[action] if action >= 0 else ""}
        if action < 0:
            said = [{"role": "user", "content": f"Answer with one of: {', '.join(words)}."}]
            return Turn(said, done=state.left <= 0, info=info)
    state.seen, reward, terminated, truncated, _ = state.inside.step(action)
    done = bool(terminated or truncated or state.left <= 0)
    return Turn([{"role": "user", "content": _text(state.inside, state.seen) or "(nothing)"}], reward, done,
                {**info, "truncated": bool(done and not terminated)})


def _maker(gymnasium, env_id: str, options: Mapping[str, Any]):
    """A function that makes the environment with text observations."""
    try:
        plain = gymnasium.make(env_id, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium cannot make {env_id!r} with {dict(options)}: {error}") from error
    if isinstance(plain.observation_space, gymnasium.spaces.Text):
        return functools.partial(gymnasium.make, env_id, **options)
    if "ansi" not in plain.metadata.get("render_modes", ()):
        raise ValueError(f"{env_id} has observations {plain.observation_space} and cannot draw itself as text; allowed are a "
                         "Text space of observations and the render mode 'ansi'")
    return functools.partial(gymnasium.make, env_id, render_mode="ansi", **options)


def _words(gymnasium, space, actions: Sequence[str] | None, env_id: str) -> list[str]:
    """The word of each action; empty if actions are text."""
    if isinstance(space, gymnasium.spaces.Text):
        return []
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"{env_id} has actions {space}; allowed are Discrete and Text spaces")
    words = [str(number) for number in range(int(space.n))] if actions is None else list(actions)
    if len(words) != space.n:
        raise ValueError(f"{len(words)} actions for {env_id}, which has {space.n}: give a word for each")
    return words


def _identity(seen: Any) -> Any:
    """An observation of numbers in types of JSON, which a rendering may show in several ways; None for other observations."""
    try:
        values = np.asarray(seen)
    except ValueError:  # parts of different lengths
        return None
    return values.tolist() if values.dtype.kind in "biuf" else None


def _text(inside, seen: Any) -> str:
    return seen if isinstance(seen, str) else _COLOURED.sub(r"[\1]", inside.render()).strip("\n")
