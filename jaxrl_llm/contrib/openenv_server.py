"""Environments of OpenEnv, which run in a server and are played over its client (package openenv)."""
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.environments.background import OpenContext, wait
from jaxrl_llm.environments.base import Died, Environment, Late, Message, Turn, environment
from jaxrl_llm.tasks.base import Problem, optional, seeded
from jaxrl_llm.tasks.jsonl import MAX_DEPTH, depth

_OURS = ("done", "reward", "metadata")  # fields of an observation that the policy does not read


@dataclasses.dataclass
class Session:
    """A connection to the server, which holds the environment's state, and the messages that the policy may still send."""

    client: OpenContext
    left: int


@environment
def openenv_server(*, url: str, action: str = "", observation: str = "", rules: str = "", turns: int = 50,
                   problems: int = 1000, heldout: int = 200, returns: tuple[float, float] = (0.0, 1.0),
                   deadline: float = 20.0, replayable: bool = False) -> Environment:
    """The environment of an OpenEnv server at an address, "http://127.0.0.1:8000". A problem is a seed of its `reset`.

    The policy's message becomes the field `action` of an action; if `action` is empty, the message is a JSON object, the whole
    action. The policy reads `rules`, then the field `observation` of each answer; if `observation` is empty, the whole answer
    as JSON without reward, end and metadata. It also reads refusals of actions. Each trajectory has a separate session, so the
    server must allow as many sessions as a batch has trajectories (`max_concurrent_envs`). `replayable` says that equal seeds
    and actions get equal answers: then trajectories run in processes, are retried and can be resumed; each process keeps the
    sessions of its last 256 unfinished trajectories. The trajectory is lost as a timeout if the server does not answer within
    `deadline` seconds, and as a crash if the server ends.
    Raises ValueError without openenv, and for a server that cannot be reached.
    """
    optional("openenv", "openenv")
    from openenv.core import GenericEnvClient

    what = f"OpenEnv server {url}"

    def ask(client: OpenContext, method: str, *arguments, **named) -> Any:
        return wait(_ask(client.value, method, arguments, named, what), deadline, what)

    def connect() -> OpenContext:
        try:
            return OpenContext(GenericEnvClient(base_url=url, connect_timeout_s=deadline, message_timeout_s=deadline + 10),
                               deadline, what)
        except ConnectionError as error:
            raise Died(f"{what}: {error}") from error

    def reset(problem: Problem, key: int) -> tuple[Session, list[Message]]:
        client = connect()
        seen = _text(ask(client, "reset", seed=problem.extra["seed"]).observation, observation)
        return Session(client, turns), [{"role": "user", "content": f"{rules}\n\n{seen}".strip()}]

    try:
        connect()
    except (Died, Late) as error:
        raise ValueError(f"{error}. Start it first, say by `uvicorn module:app --port 8000`") from error
    return Environment(
        name=f"openenv/{url.rpartition('//')[2]}", task=seeded(f"openenv/{url}", rules or url, problems, heldout), reset=reset,
        step=functools.partial(_step, ask=ask, action=action, observation=observation), returns=returns, replayable=replayable,
        waits=not replayable)


def _step(state: Session, message: Message, *, ask: Callable, action: str, observation: str) -> Turn:
    state.left -= 1
    try:
        result = ask(state.client, "step", {action: message["content"]} if action else object_of(message["content"]))
    except ActionError as error:
        return Turn([{"role": "user", "content": f"error: {error}"}], done=state.left <= 0, info={"refused": True})
    done = bool(result.done)
    said = _text(result.observation, observation) or "(nothing)"
    return Turn([{"role": "user", "content": said}], float(result.reward or 0.0), done or state.left <= 0,
                {"refused": False, "truncated": not done and state.left <= 0})


class ActionError(ValueError):
    """An action that the server refuses."""


async def _ask(client: Any, method: str, arguments: tuple, named: Mapping[str, Any], what: str) -> Any:
    """The result of a method of the client. Raises ActionError, Died."""
    from websockets.exceptions import ConnectionClosed
    from websockets.protocol import State

    if method == "step" and getattr(getattr(client, "_ws", None), "state", None) is not State.OPEN:
        raise Died(f"{what} has closed the session")  # the client would step in a new one, which was never reset
    try:
        return await getattr(client, method)(*arguments, **named)
    except (ConnectionClosed, ConnectionError) as error:
        raise Died(f"{what} has ended the session: {error}") from error
    except RuntimeError as error:  # the server's error message, by its code
        if "(code: VALIDATION_ERROR)" in str(error):
            raise ActionError(str(error)) from error
        raise


def object_of(text: str) -> dict[str, Any]:
    """The JSON object in a message, from the first to the last brace. Raises ActionError."""
    try:
        value = json.loads(text[text.find("{"):text.rfind("}") + 1] or "null")
    except (ValueError, RecursionError) as error:
        raise ActionError(f"the action is not valid JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise ActionError("say the action as a JSON object")
    if depth(value) > MAX_DEPTH:  # the client, which sends it, walks through it by recursion
        raise ActionError(f"the action is nested deeper than {MAX_DEPTH} levels")
    return value


def _text(seen: Mapping[str, Any], field: str) -> str:
    """The text of an observation. Raises ValueError if it lacks the field."""
    if not field:
        return json.dumps({name: value for name, value in seen.items() if name not in _OURS}, ensure_ascii=False)
    if field not in seen:
        raise ValueError(f"the observation has no field {field!r}; it has {sorted(seen)}")
    return seen[field] if isinstance(seen[field], str) else json.dumps(seen[field], ensure_ascii=False)
