"""Messages as chat templates expect them, whatever form a data set or a client writes them in."""
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]  # [{"role": ..., "content": ...}, ...]


def present(value: Any, kept: Sequence[str] = ()) -> Any:
    """A copy without keys whose value is null, but for the keys `kept`, at any depth of lists and objects.

    A table (parquet, arrow) has all keys in all rows: null says that the row lacks the key, and templates ask for keys.
    """
    if isinstance(value, Mapping):
        return {key: present(entry, kept) for key, entry in value.items() if entry is not None or key in kept}
    return type(value)(present(entry, kept) for entry in value) if type(value) in (list, tuple) else value


def read(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with its text parts joined to one content, and with the arguments of calls as objects.

    A message without content has an empty one. Raises ValueError, which names the place `where`, for other parts than text,
    for calls that are none, and for arguments that are no JSON.
    """
    made = {"content": "", **present(message)}
    if isinstance(content := made["content"], list):
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{where}.content={shown(content)}; give a text, or parts of type 'text' only: a list of "
                             "{'type': 'text', 'text': ...}")
        made["content"] = "".join(parts)
    calls = made.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls={shown(calls)}; give a list of {{'type': 'function', 'function': {{...}}}}")
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool, whose arguments OpenAI writes as JSON in a text, which is empty where none are given."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        raise ValueError(f"{where} is {shown(call)}; give {{'type': 'function', 'function': {{...}}}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}.function.arguments={shown(arguments)} is no JSON ({error}); give an object, or its "
                             "JSON as a text") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def spelled(messages: Messages) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON in texts, as some templates (DeepSeek) take them."""
    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        given = call["function"]["arguments"]
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [{**message, "tool_calls": [text(call) for call in message["tool_calls"]]} if message.get("tool_calls")
            else dict(message) for message in messages]


def ending(messages: Any) -> dict[str, bool]:
    """How a prompt of these messages ends, as options of `render_chat`.

    The policy continues a last message in the assistant's words; behind any other message, a call too, its turn begins.
    """
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    continued = isinstance(last, Mapping) and last.get("role") == "assistant" and not last.get("tool_calls")
    return {"add_generation_prompt": not continued, "continue_final_message": continued}


def unused(value: Any, form: str = "\ue0a1{}\ue0a2") -> str:
    """A mark that no text in `value` holds, nor makes together with its neighbours: `form` with a digest of all texts.

    A text would have to hold a digest of itself. The mark begins and ends with characters that it has nowhere else, so texts
    beside it make no second mark together with it.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    return form.format(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest())


def shown(value: Any) -> str:
    """The value as a text of up to 80 characters, for errors."""
    try:
        text = repr(value)
    except RecursionError:
        return "what is nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
