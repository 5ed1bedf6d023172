"""Rows of data sets as texts that others wrote: conversations, prompts with responses, plain texts, and pairs of them.

A row has one of four forms. If it has the columns of several, the first of this list counts:

    {"chosen": ..., "rejected": ...}     two responses, as texts or messages, with a "prompt", or conversations that begin alike
    {"messages": [...]}                  a conversation, whose messages of the assistant are learned
    {"prompt": ..., "response": ...}     texts or messages; the response is learned. "completion" is another name for it
    {"text": ...}                        a plain text, which is learned from its first token on

Every form may have a "weight", the "tools" of the conversation, its "writer", and "logprobs" of the words that are learned.
"""
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tasks import columns
from jaxrl_llm.tokenizers.messages import Messages, shown
from jaxrl_llm.tokenizers.turns import joined
from jaxrl_llm.tools.registry import unknown

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_OTHER_WORDS = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant",
                "observation": "tool", "environment": "tool"}  # of other formats
_TRACE = ("text", "messages", "writer", "correct", "logprobs")
_FORMS = "give 'messages', 'prompt' with 'response', 'text', or 'chosen' with 'rejected'"


class Chat(NamedTuple):
    """A conversation, of which the messages from number `since` on are learned, the first without its `opened` words."""

    messages: Messages
    since: int = 0
    opened: str = ""


class Plain(NamedTuple):
    """A text that is read as it is, and the reply behind it that is learned."""

    prompt: str
    reply: str


class Entry(NamedTuple):
    """What a row has: one text, or a chosen and a rejected one, and what is known of it. `logprobs` None: unknown."""

    texts: tuple[Chat | Plain, ...]
    tools: list[Any] | None = None
    weight: float = 1.0
    writer: str = ""
    logprobs: list[float] | None = None


def entry(row: Mapping[str, Any], *, prompt: str = "", response: str = "", chat: bool = True) -> Entry:
    """What a row has.

    Args:
      prompt, response: templates over columns that replace the columns of these names, see `columns`. With a `response` the
        row is of that form, whatever other columns it has.
      chat: whether texts are messages, or fed to the policy as they are.
    Raises ValueError that names the column, for a row of no form, malformed messages, unknown roles, and a pair of equal texts.
    """
    row = {name: value for name, value in row.items() if value is not None}
    row |= {name: columns.filled(template, row) for name, template in (("prompt", prompt), ("response", response)) if template}
    if response:
        row = {name: value for name, value in row.items() if name not in ("chosen", "rejected", "messages")}
    if "response" not in row and "completion" in row:
        row["response"] = row["completion"]
    texts = _texts(row, chat)
    if len(texts) == 2 and texts[0] == texts[1]:
        raise ValueError(f"'chosen' and 'rejected' are equal, {shown(row['chosen'])}, so neither can be preferred; remove the "
                         "pair")
    writer = columns.text(row.get("writer", ""), "writer")
    return Entry(texts, _tools(row.get("tools")), _weight(row.get("weight", 1.0)), writer, logprobs(row.get("logprobs")))


def messages(value: Any, name: str) -> Messages:
    """Messages of known roles; ValueError that names the message and the key."""
    read = columns.messages(value, name)
    for number, message in enumerate(read):
        if (role := message["role"]) not in ROLES:
            meant = _OTHER_WORDS.get(role.lower())
            hint = f" Did you mean {meant!r}?" if meant else ""
            raise ValueError(f"{name}[{number}].role: {unknown('role', role, ROLES)}{hint}")
    return read


def traces(value: Any, name: str) -> list[dict[str, Any]]:
    """Traces of a problem: objects with a "text" or "messages", and perhaps their "writer", "correct" and "logprobs".

    Messages are of the assistant and of the tools that answer it; the first is of the assistant. Returns them with all of these
    keys but one of the first two. Raises ValueError that names the trace and the key.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is {shown(value)}; give a list of objects with a 'text' or 'messages'")
    return [_trace(one, f"{name}[{number}]") for number, one in enumerate(value)]


def _trace(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} is {shown(given)}; give an object with a 'text' or 'messages'")
    given = {key: value for key, value in given.items() if value is not None}
    for key in given.keys() - {*_TRACE}:
        raise ValueError(f"{where}: {unknown('key', key, _TRACE)}")
    if ("text" in given) == ("messages" in given):
        raise ValueError(f"{where} has the keys {sorted(given)}; give either 'text' or 'messages'")
    if not isinstance(correct := given.get("correct"), bool | None):
        raise ValueError(f"{where}.correct is {shown(correct)}; give true or false, or leave it out if it is unknown")
    if "text" in given:
        words: dict[str, Any] = {"text": _filled(given["text"], f"{where}.text")}
    else:
        said = messages(given["messages"], f"{where}.messages")
        if said[0]["role"] != "assistant" or any(one["role"] in ("system", "developer") for one in said):
            raise ValueError(f"{where}.messages has the roles {[one['role'] for one in said]}; a trace begins with words of "
                             "the assistant, and tools and users answer it")
        words = {"messages": [dict(one) for one in said]}
    try:
        logprobs(given.get("logprobs"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return {**words, "writer": columns.text(given.get("writer", ""), f"{where}.writer"), "correct": correct,
            "logprobs": given.get("logprobs")}


def _texts(row: Mapping[str, Any], chat: bool) -> tuple[Chat | Plain, ...]:
    if "chosen" in row or "rejected" in row:
        if missing := {"chosen", "rejected"} - row.keys():
            raise ValueError(f"a pair lacks {min(missing)!r}; {_FORMS}")
        return _pair(row, chat)
    if "messages" in row:
        return (Chat(messages(row["messages"], "messages")),)
    if "response" in row:
        if "prompt" not in row:
            raise ValueError(f"a 'response' lacks its 'prompt', got keys {sorted(row)}; {_FORMS}")
        return (_behind(row["prompt"], row["response"], "response", chat),)
    if "text" in row:
        return (Plain("", _filled(row["text"], "text")),)
    if "prompt" in row:
        raise ValueError("a 'prompt' without a 'response' is a problem, of which nothing can be imitated; give the response, "
                         "or give the file as config.task")
    raise ValueError(f"no text in a row with the keys {sorted(row)}; {_FORMS}, or name other columns, prompt='{{COLUMN}}' and "
                     "response='{COLUMN}'")


def _pair(row: Mapping[str, Any], chat: bool) -> tuple[Chat | Plain, ...]:
    """The chosen and the rejected text of a row."""
    sides = [(name, row[name]) for name in ("chosen", "rejected")]
    whole = [messages(value, name) for name, value in sides if isinstance(value, list)]
    if len(whole) < 2 or any(side[0]["role"] == "assistant" for side in whole):
        if "prompt" not in row:
            raise ValueError("a pair of responses lacks its 'prompt'; give it, or conversations that begin with the same "
                             "messages as 'chosen' and 'rejected'")
        return tuple(_behind(row["prompt"], value, name, chat) for name, value in sides)
    count = next((n for n, (a, b) in enumerate(zip(*whole)) if a != b), min(map(len, whole)))
    while count and any(side[count:] and side[count]["role"] != "assistant" for side in whole):
        count -= 1
    asked = whole[0][:count]
    given = row.get("prompt", asked)
    read = [*messages(given, "prompt")] if isinstance(given, list) else given
    if not count or read not in (asked[-1]["content"], [*asked], asked):
        raise ValueError(f"the conversations 'chosen' and 'rejected' begin with {shown(list(asked))}, and 'prompt' is "
                         f"{shown(given)}; give conversations that begin with the same prompt, or leave 'prompt' out")
    return tuple(Chat(side, count) for side in whole)


def _behind(prompt: Any, words: Any, name: str, chat: bool) -> Chat | Plain:
    """A response behind its prompt."""
    if not chat:
        return Plain(_filled(prompt, "prompt"), _filled(words, name))
    asked, said = (messages(value, what) if isinstance(value, list) else ({"role": role, "content": _filled(value, what)},)
                   for value, what, role in ((prompt, "prompt", "user"), (words, name, "assistant")))
    if said[0]["role"] != "assistant":
        raise ValueError(f"{name}[0].role is {said[0]['role']!r}; a response begins with words of the assistant. Give whole "
                         "conversations as 'messages'")
    return Chat(*joined(asked, said))


def _filled(value: Any, name: str) -> str:
    """A text that is not empty, or a number as text."""
    text = columns.text(value, name)
    if not text:
        raise ValueError(f"{name!r} is an empty text; give one with words")
    return text


def _tools(value: Any) -> list[Any] | None:
    """Descriptions of tools, a list or its JSON."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except ValueError as error:
        raise ValueError(f"'tools' is no JSON ({error}): {shown(value)}") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"'tools' is {shown(tools)}; give a list of {{'type': 'function', 'function': {{...}}}}")
    return tools


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"'weight' is {shown(value)}; give a number of at least 0")
    return float(value)


def logprobs(value: Any) -> list[float] | None:
    """Log-probs, NaN for null."""
    if value is None:
        return None
    good = isinstance(value, Sequence) and not isinstance(value, str) and all(
        one is None or isinstance(one, int | float) and not isinstance(one, bool) and one <= 0 for one in value)
    if not good:
        raise ValueError(f"'logprobs' is {shown(value)}; give a list of numbers of at most 0, with null where one is unknown")
    return [math.nan if one is None else float(one) for one in value]
