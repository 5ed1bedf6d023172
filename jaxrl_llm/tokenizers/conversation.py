"""Conversations token by token: sampled tokens stay as they were sampled, and a chat template adds what follows them.

A conversation is never rendered a second time as a whole. Re-encoded text can become other tokens than the sampled ones, and
some templates change earlier turns (they drop thoughts); either would train on a conversation that never took place. Messages
of users and tools are data: control tokens spelled out in them stay plain text, and so do those in descriptions of tools,
which may come from a server. In the initial messages, the roles in `TRUSTED` are the task's own and may contain control
tokens; all later messages are data.
"""
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.tokenizers.base import Tokenizer
from jaxrl_llm.tokenizers.messages import Messages, ending, unused

TRUSTED = ("system", "assistant")
ANSWERING = ("tool", "function", "ipython")  # roles of what tools answer
_USER = {"role": "user", "content": "."}


def start(tokenizer: Tokenizer, messages: Messages, **variables) -> list[int]:
    """Ids of a conversation up to the words of the policy's first turn; `variables` (`tools`) go to the chat template.

    The policy continues a last message of the assistant, see `ending`, unless the variables say how the prompt ends. Raises
    ValueError if there is no template, or if it cannot render the messages.
    """
    end = ending(messages)
    return _encode(tokenizer, messages, tokenizer.render_chat, TRUSTED,
                   variables if end.keys() & variables.keys() else {**variables, **end})


def shared(tokenizer: Tokenizer, messages: Messages, **variables) -> list[int]:
    """The ids, before the policy's first turn, that are common to all conversations whose first messages are these."""
    alone, longer = (start(tokenizer, given, **variables) for given in (messages, [*messages, _USER]))
    common = next((place for place, (a, b) in enumerate(zip(alone, longer)) if a != b), min(len(alone), len(longer)))
    return alone[:common]


def given(tokenizer: Tokenizer, messages: Messages, **variables) -> list[int]:
    """The `ids` of messages that are tokens already. Raises ValueError for one that the tokenizer does not have."""
    ids = [token for message in messages for token in message["ids"]]
    strange = next((token for token in ids if not 0 <= token < tokenizer.vocab_size), None)
    if strange is not None:
        raise ValueError(f"the token {strange} is outside the vocabulary, 0 to {tokenizer.vocab_size - 1}; make the "
                         "environment with the tokenizer of the model")
    return ids


def extend(tokenizer: Tokenizer, ids: Sequence[int], messages: Messages, **variables) -> list[int]:
    """The ids that follow `ids`, whose last turn is the policy's: the end of that turn, `messages`, the start of its next turn.

    The end of the turn is omitted if the policy sampled it; if the turn was cut at a limit, the template's end is inserted. The
    template renders the new messages after a placeholder for the policy's turn, so nothing earlier is written again. Raises
    ValueError if the template cannot render them, or writes no turn of the policy.
    """
    new = _encode(tokenizer, messages, functools.partial(_behind, tokenizer), (), variables)
    return new[_already_there(tokenizer, ids, new):]


def shows(tokenizer: Tokenizer, messages: Messages, **variables) -> bool:
    """Whether the chat template writes these messages, with their contents, after a message of the policy."""
    try:
        text = _behind(tokenizer, messages, **variables)
    except ValueError:
        return False
    return all(line in text for message in messages for line in message["content"].splitlines())


def hidden(tokenizer: Tokenizer, messages: Messages, **variables) -> str:
    """What the chat template leaves out of these: a tool, a call, or the result of a tool; empty if it shows all.

    In their places it gets words that occur nowhere else, and these are looked for in its text.
    """
    mark = unused([messages, variables], "name{}_")
    words: dict[str, str] = {}  # in their places, and what each stands for

    def put(holder: Mapping[str, Any], key: str, what: str) -> dict[str, Any]:
        word = f"{mark}{len(words)}_"
        words[word] = f"{what} {str(holder[key])[:80]!r}"
        return {**holder, key: word}

    def named(entry: Any, what: str) -> Any:
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if isinstance(function, Mapping) and "name" in function:
            return {**entry, "function": put(function, "name", what)}
        return put(entry, "name", what) if isinstance(entry, Mapping) and "name" in entry else entry

    changed = []
    for message in messages:
        calls = [named(call, "the call of") for call in message.get("tool_calls") or ()]
        message = {**message, **({"tool_calls": calls} if calls else {})}
        changed.append(put(message, "content", "the result") if message.get("role") == "tool" else message)
    tools = [named(tool, "the tool") for tool in variables.get("tools") or ()]
    text = tokenizer.render_chat(changed, **variables | ({"tools": tools} if tools else {})) if words else ""
    return next((what for word, what in words.items() if word not in text), "")


def without_tools(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages for a template without tools: successive results, and the user's words beside them, are one of the user."""
    result: list[Mapping[str, Any]] = []
    for answers, group in itertools.groupby(messages, lambda message: message["role"] in ("user", "tool")):
        run = list(group)
        if answers and any(message["role"] == "tool" for message in run):
            run = [{"role": "user", "content": "\n".join(message["content"] for message in run)}]
        result += run
    return result


def shortened(tokenizer: Tokenizer, messages: Messages, limit: int) -> list[dict[str, Any]]:
    """Copies of the messages; a content of more than `limit` tokens keeps its first and last `limit / 2` tokens."""
    def short(text: str) -> str:
        ids = tokenizer.encode(text)
        if len(ids) <= limit:
            return text
        first, last = ids[:limit - limit // 2], ids[len(ids) - limit // 2:]
        return "".join(tokenizer.decode(half, skip_special=False) for half in (first, last))

    return [{**message, "content": short(message["content"])} for message in messages]


def said(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, str]:
    """The message that the policy sampled as `ids`: its text with control tokens spelled out, without the stop token."""
    ended = bool(len(ids)) and int(ids[-1]) in tokenizer.end_ids
    return {"role": "assistant", "content": tokenizer.decode(ids[:-1] if ended else ids, skip_special=False)}


def _behind(tokenizer: Tokenizer, messages: Messages, **variables) -> str:
    """What the template writes after a message of the policy that these messages follow."""
    said = unused([messages, variables])  # placeholder for the policy's turn; templates neither know nor trim it
    before = (_USER, {"role": "assistant", "content": said})
    _, there, text = tokenizer.render_chat([*before, *messages], **variables).partition(said)
    if not there:
        raise ValueError("the chat template leaves out or changes the policy's messages; give a template that keeps them")
    return text


def _already_there(tokenizer: Tokenizer, ids: Sequence[int], new: Sequence[int]) -> int:
    """How many of the `new` ids repeat the end of a turn that the policy has already ended itself."""
    if not len(ids) or int(ids[-1]) not in tokenizer.end_ids:
        return 0
    first = next((place for place, token in enumerate(new) if token in tokenizer.end_ids), None)
    return 0 if first is None or tokenizer.decode(new[:first]).strip() else first + 1


def guarded(tokenizer: Tokenizer, messages: Messages, variables: Mapping[str, Any]
            ) -> tuple[list[Any], dict[str, Any], str]:
    """Messages, and variables of the template, in which results of tools spell no control token, and the text that cuts them.

    The cut is to be removed from what is rendered, and the pieces are to be encoded one by one; it is empty if nothing is cut.
    Other messages of a data set are its owner's, as prompts are, and may hold control tokens.
    """
    cut = unused([list(messages), variables])
    inside = _divider(tokenizer, cut)
    trusted = {message.get("role") for message in messages} - {*ANSWERING}
    safe, changed = _changed(messages, tuple(trusted), inside, inside), _walked(variables, inside)
    return (list(messages), dict(variables), "") if safe == list(messages) and changed == variables else (safe, changed, cut)


def _divider(tokenizer: Tokenizer, cut: str) -> Callable[[str], str]:
    """A function that cuts the control tokens that a text spells after their first characters."""
    spellings = "|".join(re.escape(name) for name in tokenizer.control_tokens if len(name) > 1)

    def inside(text: str) -> str:
        return re.sub(f"(?=(?:{spellings}))(.)", rf"\1{cut}", text, flags=re.DOTALL) if spellings else text

    return inside


def _encode(tokenizer: Tokenizer, messages: Messages, render: Callable[..., str], trusted: Sequence[str],
            variables: Mapping[str, Any]) -> list[int]:
    """Ids of `render(messages, **variables)`; of messages and variables, only texts of `trusted` roles yield control tokens.

    Spellings of control tokens are cut after their first character, and the pieces are encoded one by one. Texts that
    spell one only together with their neighbours are also cut at both ends.
    """
    controls = set(tokenizer.control_tokens.values())
    cut = unused([messages, variables])
    inside = _divider(tokenizer, cut)
    def everywhere(text: str) -> str:
        return cut + inside(text) + cut
    def nothing(text: str) -> str:
        return "x" if text.strip() else text

    def encode(names: Callable[[str], str], contents: Callable[[str], str]) -> tuple[list[int], list[int]]:
        pieces = render(_changed(messages, trusted, names, contents), **_walked(variables, inside)).split(cut)
        ids = [token for piece in pieces if piece for token in tokenizer.encode(piece)]
        return ids, [token for token in ids if token in controls]

    _, own = encode(inside, nothing)
    for guard in (inside, everywhere):
        ids, present = encode(inside, guard)
        if present == own:
            return ids
    raise ValueError(f"the texts of these messages spell control tokens; remove them: {str(messages)[:400]}")


def _changed(messages: Messages, trusted: Sequence[str], names: Callable[[str], str],
             contents: Callable[[str], str]) -> list[Any]:
    """Copies of the messages; in untrusted ones, one function changes contents and another one changes other texts."""
    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str):
            return value if key in ("role", "type") else (contents if key in ("content", "text") else names)(value)
        if isinstance(value, dict):
            return {name: walk(entry, name) for name, entry in value.items()}
        return [walk(entry, key) for entry in value] if isinstance(value, (list, tuple)) else value

    return [walk(dict(message), "") if isinstance(message, Mapping) and message.get("role") not in trusted else message
            for message in messages]


def _walked(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of dictionaries and lists, in which all texts are changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_walked(name, change): _walked(entry, change) for name, entry in value.items()}
    return [_walked(entry, change) for entry in value] if isinstance(value, (list, tuple)) else value
