"""What every request to a server goes through: host and token, the limits of its body, and errors in OpenAI's format."""
import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.requests import ClientLimits, RequestError
from jaxrl_llm.serving.worker import Closed, Failure

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
          503: "server_error"}
_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_loopback(name: str) -> bool:
    """Whether a host's name, or its address, is this machine's alone."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def admit(request: Request, header: str, token: str, form: str = "TOKEN") -> None:
    """Raises `RequestError` for a wrong token in `header`, compared in constant time, whose right value has the `form`.

    The token "" needs none. Then the host must be a loopback name: a page of a browser may ask under the name that it was
    loaded from, and may have that name point to this machine meanwhile.
    """
    if token:
        if not hmac.compare_digest(request.headers.get(header, "").encode(), form.replace("TOKEN", token).encode()):
            raise RequestError(f"no or wrong token; give the header '{header}: {form}'", status=401, code="invalid_api_key")
        return
    for host in request.headers.getlist("host"):
        parts = re.fullmatch(r"(?:\[([^]]*)\]|([^:[]*?)\.?)(?::[0-9]*)?", host)
        if parts is None or not is_loopback((parts[1] or parts[2] or "").lower()):
            raise RequestError(f"the host {host!r}; without a token this server answers under localhost and loopback addresses "
                               "alone: use one of them, or start it with JAXRL_LLM_TOKEN", status=403)


async def in_thread(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """`function(...)` in a thread. A StopIteration, which no future takes, is a RuntimeError: else this would wait for ever."""
    def call() -> _R:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(f"{function} raised StopIteration") from error

    return await asyncio.to_thread(call)


async def within(seconds: float, work: Awaitable[_R]) -> _R:
    """The result of `work`; `RequestError` if it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise RequestError(f"the server was not done with this request within {seconds:g} seconds", status=503) from None


async def read(request: Request, kind: str, limits: ClientLimits) -> bytes:
    """The body. Raises `RequestError` for another content type than `kind`, too many bytes, and a body that does not arrive.

    Pages of a browser cannot send a type such as application/json to another host without being asked.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        name = "JSON" if kind == "application/json" else kind
        raise RequestError(f"the body must be {name}, with the header 'Content-Type: {kind}'", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.arrival):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise RequestError(f"the body has more than {limits.body} bytes; send fewer or shorter prompts", status=413)
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {limits.arrival:g} seconds", status=408) from None
    return bytes(body)


async def read_json(request: Request, limits: ClientLimits) -> Any:
    """The JSON of the body. Raises `RequestError` as `read` does, and for a body that is not JSON."""
    body = await read(request, "application/json", limits)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": _encodable(message), "type": _TYPES.get(status, "invalid_request_error"),
                      "param": None if param is None else _encodable(param), "code": code}}


def _encodable(text: str) -> str:
    """The text with lone surrogates escaped: JSON may name them, and UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode()


def handlers(see: str) -> dict[Any, Any]:
    """Turns exceptions into answers; `see` names the routes for requests to unknown ones."""
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; see {see}"
        return JSONResponse(error_body(message, error.status_code), error.status_code, error.headers)

    return {RequestError: _refused, HTTPException: http_error, Failure: _failed, Closed: _closed, ClientDisconnect: _gone,
            Exception: _failed}


async def _refused(request: Request, error: RequestError) -> Response:
    more = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}} | dict.fromkeys((408, 413), {"Connection": "close"})
    headers = more.get(error.status)  # the rest of a body that is refused is not waited for
    return JSONResponse(error_body(str(error), error.status, error.param, error.code), error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    message = str(error) if isinstance(error, Failure) else "the server failed at this request; its log says where"
    return JSONResponse(error_body(message, 500), 500)


async def _closed(request: Request, error: Closed) -> Response:
    return JSONResponse(error_body(str(error), 503), 503)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has closed the connection
