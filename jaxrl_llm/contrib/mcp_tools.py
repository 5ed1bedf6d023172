"""Tasks with one answer and the tools of MCP servers (Model Context Protocol), which run as programs or at addresses."""
import contextlib
import functools
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TextIO

from jaxrl_llm import tasks
from jaxrl_llm.environments.background import OpenContext, wait
from jaxrl_llm.environments.base import Died, Environment, Late, environment
from jaxrl_llm.environments.parsers import BY_NAME, named_parser
from jaxrl_llm.environments.tool_use import of_tools
from jaxrl_llm.environments.tools import Tool, ToolError
from jaxrl_llm.tasks.base import optional
from jaxrl_llm.tools import registry

START_LIMIT = 60.0  # seconds for a server to start, or to be reached
LAST_WORDS = 500  # characters of a dead server's standard error that are reported
Server = str | Sequence[str]  # an address, or a command with its arguments


@environment
def mcp_tools(*, servers: Mapping[str, Server], task: str = "arithmetic", options: Mapping[str, Any] | None = None,
              tools: Sequence[str] = (), parser: str = "hermes", reward: str | None = None, turns: int = 8,
              deadline: float = 20.0, shared: bool = False, replayable: bool = False) -> Environment:
    """A task of `jaxrl_llm.tasks` with the tools of MCP servers, all tools or the named ones, played as in `tool_use`.

    A server is a command, which is started and reached over its pipes, or an address "http://...". Each trajectory has
    separate connections, and thus separate processes, made at the first call of a tool; they end with the trajectory. With
    `shared` each process of this program keeps one connection for all trajectories, and reconnects if it has ended: for
    stateless servers. `replayable` says that such servers also answer equal calls equally: then trajectories run in processes,
    are retried and can be resumed. A call that the server refuses, or whose tool raises, is answered by the error. The
    trajectory is lost as a timeout if a call is not answered within `deadline` seconds, as a crash if a server or session ends,
    and as an error after an internal error of the server. Trajectories make their calls concurrently, beside the engine, unless
    that starts a process for each. Raises ValueError without the package mcp, for an unreachable server, for two tools of one
    name, for unknown names, and for `replayable` without `shared`.
    """
    optional("mcp", "mcp")
    if replayable and not shared:
        raise ValueError("replayable=True needs shared=True: each process that plays a trajectory again would start servers")
    problems = tasks.make_chat(task, options)
    named_parser(parser, BY_NAME)
    connect = functools.partial(_shared if shared else Connections, json.dumps(dict(servers), sort_keys=True), shared)
    try:
        listed = _listed(connect(), tools, deadline)
    except (Late, Died) as error:
        raise ValueError(f"{error}. Start it by hand to see what it says") from error

    def opened() -> tuple[list[Tool], Any]:
        connections = connect()
        return _tools(listed, connections, deadline), None if shared else connections

    return of_tools(problems, _tools(listed, connect(), deadline), name="+".join(servers), parser=parser, reward=reward,
                    turns=turns, opened=opened, replayable=replayable,
                    waits=not replayable and (shared or all(isinstance(server, str) for server in servers.values())))


class Connections:
    """Connections to servers by name, each made at its first use, and remade with `again` if the server has ended."""

    def __init__(self, servers: str, again: bool):
        self.servers: dict[str, Server] = json.loads(servers)
        self._again = again
        self._lock = threading.Lock()
        self._open: dict[str, OpenContext] = {}

    def __getitem__(self, name: str) -> "_Connection":
        """The connection to the server of this name. Raises Late, Died."""
        with self._lock:
            if name not in self._open or self._again and self._open[name].value.ended:
                self._open[name] = _opened(name, self.servers[name])
            return self._open[name].value

    def __deepcopy__(self, memo):
        raise TypeError("a server cannot be copied, so neither can a trajectory with one of its own; set shared=True")


_shared = functools.cache(Connections)


def _opened(name: str, server: Server) -> OpenContext:
    what = f"MCP server {name!r}, {server if isinstance(server, str) else ' '.join(server)}"
    try:
        return OpenContext(_client(server, what), START_LIMIT, what)
    except (Late, Died):
        raise
    except Exception as error:  # errors of the package or the system, or groups of them
        raise Died(f"{what}: {_first(error)!r}") from error


class _Connection:
    """A client of a server, and the server's standard error."""

    def __init__(self, client: Any, errors: TextIO, what: str):
        self._client, self._errors, self.what, self.ended = client, errors, what, False

    async def __call__(self, method: str, *arguments, **named) -> Any:
        """The result of a method of the client.

        Raises ToolError if the server refuses, RuntimeError for a fault of the server, Died if it or the session is gone.
        """
        import mcp

        if self.ended:
            raise _died(self.what, self._errors)
        try:
            return await getattr(self._client, method)(*arguments, **named)
        except mcp.MCPError as error:
            if error.code in (mcp.types.CONNECTION_CLOSED, mcp.types.INVALID_REQUEST):  # the session is not known
                self.ended = True
                raise _died(self.what, self._errors, error.message) from error
            if error.code in (mcp.types.INTERNAL_ERROR, mcp.types.PARSE_ERROR):
                raise RuntimeError(f"{self.what}: {error.message}") from error
            raise ToolError(error.message) from error


@contextlib.asynccontextmanager
async def _client(server: Server, what: str) -> AsyncIterator[_Connection]:
    import mcp

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        transport = server if isinstance(server, str) else mcp.stdio_client(
            mcp.StdioServerParameters(command=server[0], args=list(server[1:])), errlog=errors)
        try:
            async with mcp.Client(transport) as client:
                connection = _Connection(client, errors, what)
                try:
                    yield connection
                finally:
                    connection.ended = True
        except Exception as error:  # possibly a group of errors
            if isinstance(_first(error), mcp.MCPError):
                raise _died(what, errors) from error
            raise


def _died(what: str, errors: TextIO, why: str = "") -> Died:
    """The error with the server's last output, else with the reason `why`."""
    said = ""
    if not errors.closed:  # closed when the connection has ended
        errors.seek(0)
        said = errors.read()[-LAST_WORDS:].strip()
    return Died(f"{what} has ended; it said: {said or why or '(nothing)'}")


def _listed(connections: Connections, names: Sequence[str], deadline: float) -> list[tuple[str, Any]]:
    """`(server, description)` of all tools. Raises ValueError for a duplicate or missing name."""
    tools: dict[str, tuple[str, Any]] = {}
    for server in connections.servers:
        connection, cursor = connections[server], None
        while True:
            page = wait(connection("list_tools", cursor=cursor), deadline, connection.what)
            for tool in page.tools:
                if tool.name in tools and (not names or tool.name in names):
                    raise ValueError(f"the MCP servers {tools[tool.name][0]!r} and {server!r} both have a tool {tool.name!r}; "
                                     "take one of them, or name the tools that you want")
                tools[tool.name] = server, tool
            if (cursor := page.next_cursor) is None:
                break
    for name in names:
        registry.one_of("tool of the MCP servers", name, tools)
    if not tools:
        raise ValueError(f"the MCP servers {sorted(connections.servers)} have no tools")
    return [tools[name] for name in names or tools]


def _tools(listed: Sequence[tuple[str, Any]], connections: Connections, deadline: float) -> list[Tool]:
    """The tools, which call the servers over these connections."""
    def of(server: str, tool: Any) -> Tool:
        def call(**arguments) -> str:
            connection = connections[server]
            return text_of(wait(connection("call_tool", tool.name, arguments), deadline, f"{connection.what}, {tool.name}"))

        return Tool(tool.name, tool.description or "", tool.input_schema, call)

    return [of(*one) for one in listed]


def text_of(result: Any) -> str:
    """The texts of a result; other contents by their type. Raises ToolError if the tool reports a failure."""
    parts = [part.text if part.type == "text" else f"({part.type})" for part in result.content]
    text = "\n".join(parts) if parts else json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolError(text)
    return text


def _first(error: BaseException) -> BaseException:
    """The first error of a group of errors."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
