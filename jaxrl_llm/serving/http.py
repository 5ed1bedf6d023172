"""What every request to a server goes through: the token, the limit of its body, and errors in OpenAI's format."""
import hmac
import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxrl_llm.serving.requests import Refused
from jaxrl_llm.serving.worker import Closed, Failure

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error",
          503: "server_error"}


def check_token(given: str, token: str, header: str) -> None:
    """Compares in constant time. Raises `Refused` for a wrong token, naming its `header`; the token "" needs none."""
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        raise Refused(f"no or wrong token; give the header '{header}'", status=401, code="invalid_api_key")


async def read(request: Request, kind: str, limit: int) -> bytes:
    """The body. Raises `Refused` for another content type than `kind`, or more than `limit` bytes.

    Pages of a browser cannot send a type such as application/json to another host without being asked.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        name = "JSON" if kind == "application/json" else kind
        raise Refused(f"the body must be {name}, with the header 'Content-Type: {kind}'", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Refused(f"the body has more than {limit} bytes; send fewer or shorter prompts", status=413)
    return bytes(body)


async def read_json(request: Request, limit: int) -> Any:
    """The JSON of the body. Raises `Refused` as `read` does, and for a body that is not JSON."""
    body = await read(request, "application/json", limit)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None


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

    return {Refused: _refused, HTTPException: http_error, Failure: _failed, Closed: _closed, ClientDisconnect: _gone,
            Exception: _failed}


async def _refused(request: Request, error: Refused) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error_body(str(error), error.status, error.param, error.code), error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    message = str(error) if isinstance(error, Failure) else "the server failed at this request; its log says where"
    return JSONResponse(error_body(message, 500), 500)


async def _closed(request: Request, error: Closed) -> Response:
    return JSONResponse(error_body(str(error), 503), 503)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has closed the connection
