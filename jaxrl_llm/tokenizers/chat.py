"""Chat templates: which of a checkpoint's templates is used, and how it renders a conversation."""
import difflib
import json
import re
import reprlib
from collections.abc import Mapping
from os import getpid
from typing import Any

from jaxrl_llm.tokenizers.messages import Messages, present, spelled, unused
from jaxrl_llm.tokenizers.renderer import MARKS, shared

_GIVEN = (  # by a conversation or a tokenizer
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "pad_token"
)
_NULL_IS_A_VALUE = ("default", "const")  # of JSON Schema, in descriptions of tools


def choose(given: str | None, own: Mapping[str, str]) -> dict[str, str]:
    """The templates to use, by name: a checkpoint's `own`, or instead of them the one `given` by name or as jinja source.

    A checkpoint's only template is the default, whatever its name. Raises ValueError for a misspelt name.
    """
    near = difflib.get_close_matches(given, own, n=1) if given is not None and "{" not in given else []
    if near and given not in own:
        raise ValueError(
            f"chat_template={given!r} is neither jinja source nor the name of a template, which are {sorted(own)}; "
            f"did you mean {near[0]!r}?")
    if given is not None:
        return {"default": own.get(given, given)}
    return {"default": text for text in own.values()} if len(own) == 1 else dict(own)


def select(templates: Mapping[str, str], tools: Any) -> str:
    """The template for a conversation: "tool_use" if there is one and the conversation has tools, else "default".

    Raises ValueError if there is no such template.
    """
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    if name in templates:
        return templates[name]
    if templates:
        raise ValueError(
            f"this tokenizer has the chat templates {sorted(templates)} and none called 'default'; choose one by its name with "
            "load(path, chat_template=NAME)")
    raise ValueError("this tokenizer has no chat template; give one with load(path, chat_template='<jinja source>'), put a "
                     "chat_template.jinja beside tokenizer.json, or encode plain text with encode()")


def generation_marks(templates: Mapping[str, str], messages: Messages, variables: Mapping[str, Any]) -> dict[str, str] | None:
    """Variables by which the template encloses its {% generation %} parts in two texts that occur nowhere else.

    None for a template without such parts.
    """
    if not re.search(r"{%-?\s*generation\b", select(templates, variables.get("tools"))):
        return None
    return {name: unused([messages, variables, name]) for name in MARKS}


def preset(templates: Mapping[str, str], variables: Mapping[str, Any]) -> dict[str, str]:
    """The templates, which have these variables wherever a conversation does not give them another value.

    They are set at the beginning of each template, so that they hold wherever the template goes, as into an export. Raises
    ValueError for a name that no template reads, and for a value that is no literal of jinja.
    """
    for name in variables:
        if name in _GIVEN or not any(re.search(rf"\b{name}\b", text) for text in templates.values()):
            raise ValueError(
                f"{name!r} is no variable that the chat templates {sorted(templates)} leave to their users; give the name of "
                "one that a template reads, for example enable_thinking")
    literals = {name: _literal(value) for name, value in variables.items()}
    head = "".join(f"{{% if {name} is not defined %}}{{% set {name} = {v} %}}{{% endif %}}" for name, v in literals.items())
    return {kind: f"{head}\n{text}" if head else text for kind, text in templates.items()}  # jinja drops this line break


def _literal(value: Any) -> str:
    """A value as jinja writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(entry)}' for key, entry in value.items())}}}"
    if value is None or not isinstance(value, str | int | float) or value in ("true", "false", "null", "none"):
        raise ValueError(f"{value!r} is no value of a chat template; give a text, a number, True, False, or a list of them")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def render(template: str, messages: Messages, add_generation_prompt: bool, continue_final_message: bool,
           variables: Mapping[str, Any]) -> str:
    """The text of a conversation; `messages` is a list of {"role": ..., "content": ...}.

    With `continue_final_message` the text ends where the content of the last message ends, so that the model continues it.
    A key of a message or tool whose value is null is absent. A template that fails on calls gets their arguments as JSON texts.
    Templates come with a checkpoint and are not trusted: a separate process renders them, sandboxed, with limits of time,
    memory and length (`jaxrl_llm.tokenizers.renderer`). Raises ValueError for malformed messages, and for a template that does
    not compile, refuses the messages, fails or exceeds a limit.
    """
    if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {_shortened(messages)}")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message=True leaves the last message open, add_generation_prompt=True opens a new one; give "
            "add_generation_prompt=False as well to continue the last message")
    try:
        given = _plain({"tools": None, "documents": None, **variables, "add_generation_prompt": add_generation_prompt})
        given |= {name: present(given[name], _NULL_IS_A_VALUE) for name in ("tools", "documents")}
        conversation = present(_plain(list(messages)))
        mark = unused([conversation, given]) if continue_final_message else ""
        final = _open_end(conversation, mark) if continue_final_message else None
        text = _rendered(template, given, conversation)
        return text if final is None else _cut(text, final, mark)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the chat template cannot render these messages: {error}. The messages: {_shortened(messages)}") from error


def _rendered(template: str, variables: dict[str, Any], messages: list[dict]) -> str:
    try:
        return shared(getpid()).render(template, {**variables, "messages": messages})
    except ValueError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        try:
            return shared(getpid()).render(template, {**variables, "messages": spelled(messages)})
        except (ValueError, TypeError, KeyError):  # the first error says more
            pass
        raise


def _plain(value: Any) -> Any:
    """A copy in the types of JSON, and tuples. Raises TypeError for others, whose methods a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return (int if isinstance(value, int) else float)(value)
    if getattr(value, "ndim", None) == 0:  # a number of numpy
        return _plain(value.item())
    raise TypeError(
        f"they or the template's variables hold a value of type {type(value).__name__}; allowed are text, numbers, booleans, "
        "None, lists and dictionaries of them")


def _open_end(messages: list[dict], mark: str) -> str:
    """Appends a mark, and a space, which a template may trim, to the (last) text of the last message; returns that text."""
    content = messages[-1].get("content") if messages else None
    parts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    holder, key = (parts[-1], "text") if parts else (messages[-1] if messages else {}, "content")
    final = holder.get(key)
    if not isinstance(final, str):
        raise ValueError("continue_final_message needs a last message whose content is a text, or has one")
    holder[key] = f"{final}{mark} "
    return final


def _cut(text: str, final: str, mark: str) -> str:
    """`text` up to the mark, and without the space before it if the template trimmed the end of the message."""
    place = text.rfind(mark)
    if place < 0 or final.strip() not in text:
        raise ValueError("the template changes or leaves out the last message, which therefore cannot be continued")
    return text[:place] if text.startswith(f"{mark} ", place) else text[:place].rstrip()


def _shortened(messages: Any) -> str:
    """The messages as one short line, however many, long and nested they are."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(messages)[:400]
