"""Environments of the tinker cookbook, which read and write tokens (package tinker-cookbook)."""
import contextlib
import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.environments.background import OpenContext, wait
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.tasks.base import Problem, disjoint_task, optional
from jaxrl_llm.tools import registry


@dataclasses.dataclass
class CookbookEpisode:
    """The environments that a builder made, all observed and sampled tokens, and the transitions so far."""

    group: OpenContext
    builder: Any
    ids: list[int]
    transitions: list[Any]

    @property
    def inside(self) -> Any:
        """The environment."""
        return self.group.value[0]


@environment
def tinker_cookbook_env(*, dataset: str, options: Mapping[str, Any] | None = None, heldout: int = 100,
                        returns: tuple[float, float] = (0.0, 1.0), deadline: float = 30.0,
                        replayable: bool = False) -> Environment:
    """The environments of an `RLDatasetBuilder`, which your "module:function" returns, token by token.

    A problem is an `EnvGroupBuilder` of its training or test data; without test data the last `heldout` ones are held out. Each
    trajectory uses the first environment of a group made for it. Tokens come from the environment's renderer, which must have
    the tokenizer and the control tokens of the model; its stop sequences must be those of the run
    (`config.sampling.stop_strings`). Each observation must begin with all earlier observations and messages; a renderer that
    drops or rewrites earlier turns is refused at that turn. Rewards that compare the trajectories of a group see one
    trajectory, without log-probs. `replayable`: equal tokens get equal answers; then trajectories run in processes, are retried
    and can be resumed. Raises ValueError without tinker-cookbook or problems, and if the function returns something else.
    """
    optional("tinker_cookbook", "tinker-cookbook")
    from tinker_cookbook.rl.types import RLDatasetBuilder

    made = registry.own("dataset", dataset, dict(options or {}), RLDatasetBuilder)
    training, test = wait(made(), 20 * deadline, dataset)
    train = _places("train", training)
    held = _places("test", test) if test is not None else train[len(train) - heldout:]
    train = train if test is not None else train[:len(train) - heldout]
    sides = {"train": training, "test": test}

    def reset(problem: Problem, key: int) -> tuple[CookbookEpisode, list[Message]]:
        side, batch, row = problem.extra["builder"]
        builder = copy.deepcopy(sides[side].get_batch(batch)[row])
        group = OpenContext(_group(builder), deadline, dataset)
        ids = _tokens(wait(_began(group.value[0]), deadline, dataset))
        return CookbookEpisode(group, builder, list(ids), []), [{"role": "user", "content": "", "ids": ids}]

    return Environment(
        name=dataset.partition(":")[2], task=disjoint_task(dataset, train, held, _problem, reward="environment"), reset=reset,
        step=functools.partial(_step, deadline=deadline, what=dataset), returns=returns, replayable=replayable,
        waits=not replayable, tokens=True)


def _places(side: str, dataset: Any) -> list[tuple[str, int, int]]:
    """The place of each builder in a data set. The last batch may be smaller than the others, which have equal sizes."""
    if not len(dataset):
        return []
    size, last = len(dataset.get_batch(0)), len(dataset) - 1
    return [(side, batch, row) for batch in range(last + 1)
            for row in range(size if batch < last else len(dataset.get_batch(last)))]


def _problem(place: tuple[str, int, int], number: int) -> Problem:
    return Problem(({"role": "user", "content": "/".join(map(str, place))},), "", number, extra={"builder": place})


@contextlib.asynccontextmanager
async def _group(builder: Any) -> AsyncIterator[Sequence[Any]]:
    """The environments of a builder, which cleans up after them."""
    try:
        yield await builder.make_envs()
    finally:
        await builder.cleanup()


async def _began(inside: Any) -> Any:
    initial = await inside.initial_observation()
    if not isinstance(initial, tuple):  # InitialObservationOverflow
        raise ValueError("the first observation is longer than the environment allows, by its own budget of tokens")
    return initial[0]


def _tokens(observed: Any) -> list[int]:
    """The tokens of a ModelInput. Raises ValueError if it holds something else, such as an image."""
    kinds = sorted({chunk.type for chunk in observed.chunks} - {"encoded_text"})
    if kinds:
        raise ValueError(f"an observation holds {', '.join(kinds)}; allowed are tokens of text")
    return observed.to_ints()


def _step(state: CookbookEpisode, message: Message, *, deadline: float, what: str) -> Turn:
    """The environment's turn. A message without tokens, as in an audit, is read as its bytes."""
    said = list(message.get("ids", message["content"].encode()))
    result = wait(state.inside.step(said), deadline, what)
    state.transitions.append(_transition(state.ids, said, result))
    info = {name: float(value) for name, value in result.metrics.items() if np.isfinite(value)}
    if result.episode_done:
        return Turn(reward=result.reward + _group_reward(state, result, deadline, what), done=True, info=info)
    seen, before = _tokens(result.next_observation), state.ids + said
    if seen[:len(before)] != before:
        same = next((place for place, (a, b) in enumerate(zip(seen, before)) if a != b), min(len(seen), len(before)))
        raise ValueError(f"{what} observes other tokens from place {same} of the {len(before)} on that were observed and said; "
                         "take a renderer that keeps earlier turns as they were")
    state.ids = seen
    return Turn([{"role": "user", "content": "", "ids": seen[len(before):]}], result.reward, info=info)


def _transition(ids: Sequence[int], said: list[int], result: Any) -> Any:
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Transition

    return Transition(tinker.ModelInput.from_ints(list(ids)), TokensWithLogprobs(said, None), result.reward,
                      result.episode_done, result.metrics, result.logs)


def _group_reward(state: CookbookEpisode, result: Any, deadline: float, what: str) -> float:
    """The group reward of the trajectory as a group of one."""
    from tinker_cookbook.rl.types import Trajectory

    played = Trajectory(state.transitions, result.next_observation)
    return wait(state.builder.compute_group_rewards([played], state.group.value[:1]), deadline, what)[0][0]
