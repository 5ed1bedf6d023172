"""Environments of the package verifiers, version 1: tasksets, toolsets and the agents that play them.

The package's `Env.run` asks agents for turns, while our runner asks an environment for the answer to a turn. So a run is a task
of the event loop whose agents (`_Seat`) wait for the policy's messages.
"""
import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.contrib.mcp_tools import text_of
from jaxrl_llm.environments import tools as tool_room
from jaxrl_llm.environments.background import OpenContext, wait
from jaxrl_llm.environments.base import Environment, Message, Turn, environment
from jaxrl_llm.environments.described import described
from jaxrl_llm.environments.parsers import BY_NAME, named_parser
from jaxrl_llm.tasks.base import Problem, disjoint_task, optional
from jaxrl_llm.tools import registry

Parse = Callable[[str], list[tool_room.Call]]


@dataclasses.dataclass
class VerifiersEpisode:
    """A run of the package that waits for the policy, and the seat whose turn it is."""

    run: OpenContext
    seat: int = 0


class _Asked(NamedTuple):
    """The messages that the policy must answer, and the seat that it plays."""

    seat: int
    messages: list[Message]


@environment
def verifiers_env(*, taskset: str, env: str = "", config: Mapping[str, Any] | None = None, parser: str = "hermes",
                  problems: int = 1000, heldout: int = 100, returns: tuple[float, float] = (0.0, 1.0),
                  deadline: float = 30.0, replayable: bool = False) -> Environment:
    """A taskset of verifiers by its id, played by its own `Env`, or by the `Env` of the id `env`.

    `config` is the rest of the `EnvConfig`, as a dictionary (`{"taskset": {...}}`). Tasks are the problems; the last `heldout`
    of the first `problems + heldout` are held out. The policy plays each agent like the harness `null`: it calls the tools of
    the toolsets, which run in this process, separately for each episode, until it sends a message without a call. Rewards,
    metrics, stops, `setup` and `finalize` are those of the task and of the `Env`. With several agents the policy plays all of
    them in one conversation, with the fact `agent`, and the return is the mean of their rewards. There is no sandbox for
    programs: other harnesses, tasks that need a container, rewards that need a runtime, interceptors, stops at one message,
    resources that an `Env` starts, and agents that are not trained (which another model plays) are refused. `replayable`:
    equal messages get equal answers; then trajectories run in processes, are retried and can be resumed. Raises ValueError
    for refused features, and without the package.
    """
    optional("verifiers", "verifiers")
    import verifiers.v1 as vf

    parse = named_parser(parser, BY_NAME)
    given = dict(config or {})
    loaded = vf.load_environment(vf.resolve_env_config(
        {**given, "id": env, "taskset": {**given.get("taskset", {}), "id": taskset}}))
    tasks = list(itertools.islice(loaded.taskset, problems + heldout))
    if type(loaded).start is not vf.Env.start:
        raise ValueError(f"{type(loaded).__name__} starts resources that all episodes share, which is not done here")
    for task in tasks[:1]:
        _check(task)
    schemas = _schemas(loaded)
    seats = sorted(_seats(loaded))

    def reset(problem: Problem, key: int) -> tuple[VerifiersEpisode, list[Message]]:
        run = OpenContext(_run(loaded, tasks[problem.extra["row"]], seats, parse), deadline, taskset)
        asked = wait(run.value(None), deadline, taskset)
        if not isinstance(asked, _Asked):
            raise ValueError(f"the episode of task {problem.id} ended before any agent was asked for a turn")
        return VerifiersEpisode(run, asked.seat), asked.messages

    def problem_of(row: int, number: int) -> Problem:
        data = tasks[row].data
        return Problem(({"role": "user", "content": data.prompt_text},), str(getattr(data, "answer", "") or ""), number,
                       extra={"row": row})

    rows, several = list(range(len(tasks))), len(seats) > 1
    first = max(len(tasks) - heldout, 0)
    return Environment(
        name=taskset if not env else f"{env}+{taskset}", reset=reset, replayable=replayable, waits=not replayable,
        returns=returns, tools=schemas, calls=described(schemas, parser),
        cut=functools.partial(_cut, deadline=deadline, what=taskset),
        task=disjoint_task(f"verifiers/{taskset}", rows[:first], rows[first:], problem_of, reward="environment"),
        step=functools.partial(_step, deadline=deadline, what=taskset, several=several),
        facts={"agent": "turn", "functional_group": "turn"} if several else {})


def _step(state: VerifiersEpisode, message: Message, *, deadline: float, what: str, several: bool) -> Turn:
    info: dict[str, Any] = {"agent": state.seat, "functional_group": state.seat} if several else {}
    asked = wait(state.run.value(message["content"]), deadline, what)
    if isinstance(asked, _Asked):
        state.seat = asked.seat
        return Turn(asked.messages, info=info)
    metrics = {name: value for trace in asked.values() for one in trace for name, value in one.metrics.items()}
    earned = _earned(asked)
    return Turn(reward=sum(earned) / len(earned), done=True,
                info={**info, "metrics": metrics, **({"returns": earned} if several else {})})


def _earned(traces: Mapping[str, Sequence[Any]]) -> list[float]:
    """The rewards of each seat of an episode that has ended."""
    return [sum(one.reward for one in of_seat) for of_seat in traces.values()]


def _cut(state: VerifiersEpisode, *, deadline: float, what: str) -> float:
    """The mean reward of the agents where a limit of the run ends the episode: none of them speaks again."""
    asked = wait(state.run.value(None, True), deadline, what)
    while isinstance(asked, _Asked):
        asked = wait(state.run.value(None, True), deadline, what)
    earned = _earned(asked)
    return sum(earned) / len(earned)


def _seats(loaded: Any) -> dict[str, Any]:
    """The configuration of each agent, by name."""
    from verifiers.v1.configs.agent import agent_config_fields

    return agent_config_fields(loaded.config)


def _check(task: Any) -> None:
    """Raises ValueError for a task with unsupported needs."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    what = type(task).__name__
    if task.NEEDS_CONTAINER or task.data.image:
        raise ValueError(f"the tasks {what} run in containers, which are not started here; take a taskset that needs none")
    for hook in task.hooks("reward"):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            raise ValueError(f"the reward {hook.__name__!r} of {what} looks into a runtime, and there is none here")
    single = [hook for hook in task.hooks("stop") if hook_boundary(hook, allow_trace=True) is not vf.Trace]
    if single or discover_decorated(task, "intercept"):
        raise ValueError(f"the tasks {what} intercept requests or responses, or stop at one; here stops read the trace alone")


def _toolsets(loaded: Any) -> list[tuple[Any, bool]]:
    """The tool servers of a rollout, and whether each belongs to the task rather than to all tasks."""
    config = loaded.taskset.config
    task_type = type(loaded.taskset).task_type()
    return [*((one, False) for one in loaded.taskset.toolsets(config)),
            *((one, True) for one in task_type.toolsets(config.task))]


@contextlib.asynccontextmanager
async def _clients(loaded: Any, trace: Any, data: Any) -> AsyncIterator[dict[str, tuple[Any, Any]]]:
    """`(client, tool)` of each tool by the name that the policy reads; the tools' state is the trace's."""
    import mcp
    from mcp.server.mcpserver import MCPServer

    async def state() -> Any:
        return trace.state

    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for toolset, of_task in _toolsets(loaded):
            if trace is not None:  # otherwise the tools are only listed
                await toolset.setup()
                toolset._pull_state = state  # no other process has it, so nothing is pulled or pushed
                if of_task:
                    await toolset.setup_task(data)
            server: Any = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            client = await stack.enter_async_context(mcp.Client(toolset.config.url or server))
            for tool in (await client.list_tools()).tools:
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                if name in clients:
                    raise ValueError(f"two toolsets have a tool {name!r}; give one a TOOL_PREFIX of its own")
                clients[name] = client, tool
        yield clients


def _schemas(loaded: Any) -> tuple[dict, ...]:
    """The schemas of all tools, for the chat template."""
    async def listed() -> tuple[dict, ...]:
        async with _clients(loaded, None, None) as clients:
            return tuple(_tool(name, tool).schema for name, (_, tool) in clients.items())

    return wait(listed(), 30.0, "the toolsets")


def _tool(name: str, tool: Any) -> tool_room.Tool:
    return tool_room.Tool(name, tool.description or "", tool.input_schema, str)


@contextlib.asynccontextmanager
async def _run(loaded: Any, task: Any, seats: list[str], parse: Parse) -> AsyncIterator[Any]:
    """`advance(said)` of one episode, which returns the next `_Asked`, or at the end the traces of each seat.

    The first call opens the episode with None. With `cut` the policy says None, after which its agent's trace stops.
    """
    import verifiers.v1 as vf

    asked: asyncio.Queue = asyncio.Queue()
    answers: asyncio.Queue = asyncio.Queue()
    episode = vf.Episode(task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash))
    table = _Table(loaded, parse, asked, answers, asyncio.Lock(), episode, seats)

    async def play() -> dict[str, list[Any]]:
        agents = _Agents(table)
        await loaded.setup(agents)
        fixed = [name for name in seats if not getattr(agents, name).trainable]
        if fixed:
            raise ValueError(f"the agents {fixed} are not trained and need another model, which is not supported")
        await loaded.run(task, agents)
        await loaded.finalize(task, episode)
        return {name: [trace for trace in episode.traces if trace.agent.name == name] for name in seats}

    running = asyncio.ensure_future(play())

    async def advance(said: str | None, cut: bool = False) -> Any:
        if cut or said is not None:
            answers.put_nowait(said)
        getting = asyncio.ensure_future(asked.get())
        await asyncio.wait({getting, running}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        getting.cancel()
        return running.result()

    try:
        yield advance
    finally:
        running.cancel()


class _Table(NamedTuple):
    """The state that the agents of an episode share: one speaks at a time."""

    loaded: Any
    parse: Parse
    asked: asyncio.Queue
    answers: asyncio.Queue
    lock: asyncio.Lock
    episode: Any
    seats: list[str]

    async def say(self, seat: str, messages: list[Message]) -> str | None:
        """The policy's answer to these messages; None if it says nothing more."""
        async with self.lock:
            self.asked.put_nowait(_Asked(self.seats.index(seat), messages))
            return await self.answers.get()


class _Agents:
    """The agents of an episode by attribute, as `Env.run` takes them."""

    def __init__(self, table: _Table):
        for name, config in _seats(table.loaded).items():
            setattr(self, name, _Seat(table, name, config))


class _Seat:
    """An agent that the policy plays, with the methods of an `Agent` that `Env.run` may call."""

    def __init__(self, table: _Table, name: str, config: Any):
        self._table, self._name, self.config, self.trainable = table, name, config, True

    async def run(self, task: Any) -> Any:
        """The trace of a task, played to its end."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        """A conversation about a task, turn by turn; it is scored at the end."""
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(), agent=vf.AgentInfo(config=self.config, name=self._name, trainable=self.trainable))
        await task.setup(trace, None)
        async with _clients(self._table.loaded, trace, task.data) as clients:
            yield _Interaction(self._table, self._name, task, trace, clients, self.config.max_turns)
        await task.finalize(trace, None)
        await task.score(trace)
        trace.is_completed = trace.ok = True
        self._table.episode.traces.append(trace)


class _Interaction:
    """The methods of an `Interaction` that `Env.run` may call."""

    def __init__(self, table: _Table, seat: str, task: Any, trace: Any, clients: Mapping[str, tuple[Any, Any]],
                 limit: int | None):
        self._table, self._seat, self._task, self.trace, self._clients, self._limit = table, seat, task, trace, clients, limit
        self._messages: list[Any] = []  # the whole conversation
        self._said = 0  # number of messages that the policy has read or sent

    async def turn(self, message: str | None = None) -> Any:
        """The policy's answer to the task or to a user's message, with its preceding tool calls."""
        import verifiers.v1 as vf

        if self.trace.stop_condition is not None:
            return vf.Segment(messages=[], terminated=True)
        if not self._messages:
            self._messages += _opening(self._task.data)
        if message is not None:
            self._messages.append(vf.UserMessage(content=message))
        first = len(self._messages)
        while await self._once():
            pass
        return vf.Segment(messages=self._messages[first:])

    async def _once(self) -> bool:
        """One message of the policy and the results of its calls; returns whether the turn continues after them."""
        import verifiers.v1 as vf

        new = [_plain(message) for message in self._messages[self._said:]]
        text = await self._table.say(self._seat, new)
        if text is None:
            self.trace.stop("cut")
            return False
        calls = self._table.parse(text) if self._clients else []
        called = [vf.ToolCall(id=f"{len(self._messages)}-{place}", name=call.name, arguments=json.dumps(dict(call.arguments)))
                  for place, call in enumerate(calls)]
        answer = vf.AssistantMessage(content=text, tool_calls=called or None)
        _commit(self.trace, self._messages, answer)
        self._messages.append(answer)
        self._said = len(self._messages)
        for one, call in zip(called, calls):
            self._messages.append(vf.ToolMessage(tool_call_id=one.id, name=call.name, content=await self._result(call)))
        await self._stop()
        return bool(calls) and self.trace.stop_condition is None

    async def _stop(self) -> None:
        """Ends the trace if a stop of the task applies, or if the agent has used its turns."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        for hook in self._task.hooks("stop"):
            if await call_hook(hook, {vf.Trace: self.trace}):
                self.trace.stop(hook.__name__)
        if self._limit is not None and self.trace.num_turns >= self._limit:
            self.trace.stop("max_turns")

    async def _result(self, call: tool_room.Call) -> str:
        """The text that the policy reads after a call."""
        try:
            if call.error:
                raise tool_room.ToolError(call.error)
            client, tool = self._clients[registry.one_of("tool", call.name, self._clients)]
            ours = _tool(call.name, tool)
            tool_room.check(ours, call.arguments)
            arguments = tool_room.as_typed(ours.parameters, dict(call.arguments))
            return tool_room.shorten(text_of(await client.call_tool(tool.name, arguments)))
        except ValueError as error:  # ToolError among them
            return f"error: {error}"


def _opening(data: Any) -> list[Any]:
    import verifiers.v1 as vf

    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
    return [*([vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []), *prompt]


def _plain(message: Any) -> Message:
    """A message as a dictionary of texts, without images."""
    from verifiers.v1.types import content_text

    name = {"name": message.name} if getattr(message, "name", None) else {}
    return {"role": message.role, "content": content_text(message.content), **name}


def _commit(trace: Any, prompt: list[Any], answer: Any) -> None:
    """Adds a turn to the graph of messages that rewards read."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import prepare_turn

    reason = "tool_calls" if answer.tool_calls else "stop"
    prepare_turn(trace, list(prompt)).commit(
        vf.Response(id=f"{len(prompt)}", created=0, model="policy", message=answer, finish_reason=reason))
