"""What a chat template shows of an environment's tools and their results, and what the prompt says in its place."""
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_llm.environments import base
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers import conversation
from jaxrl_llm.tokenizers.messages import ending


def variables_of(environment: base.Environment) -> dict[str, Any]:
    """The variables of a chat template beside messages."""
    return {"tools": list(environment.tools)} if environment.tools else {}


def behind(opening: Sequence[base.Message], text: str) -> list[base.Message]:
    """The opening with a text before its first message that all agents read, and behind a rule of the system.

    It is part of that message, since some chat templates have no system, and write one of their own where none is given.
    """
    first = opening[0]
    system = first["role"] == "system"
    content = f"{first['content']}\n\n{text}" if system else f"{text}\n\n{first['content']}"
    return [{**first, "content": content}, *opening[1:]]


def describes_tools(tokenizer, environment: base.Environment) -> bool:
    """Whether the environment has a description of its tools, and the published chat template shows nothing of them.

    A policy of bytes, which is made from scratch, cannot read a description.
    """
    if not environment.calls or not tokenizer.published:
        return False
    said = [{"role": "user", "content": "271828"}]
    return conversation.start(tokenizer, said) == conversation.start(tokenizer, said, **variables_of(environment))


def hears_tools(tokenizer, environment: base.Environment) -> bool:
    """Whether the chat template writes messages of tools after one of the policy; True for environments of tokens.

    Raises ValueError if the environment has tools, and the template writes their results neither so nor as the user's.
    """
    results = [{"role": "tool", "name": "probe", "content": content} for content in ("result 271828", "result 314159")]
    variables = variables_of(environment)
    if environment.tokens or conversation.shows(tokenizer, results, **variables):
        return True
    if environment.tools and not conversation.shows(tokenizer, conversation.without_tools(results), **variables):
        raise ValueError(f"environment {environment.name!r} answers calls, and the chat template writes neither messages "
                         "of tools nor of the user after one of the policy; set config.model.chat_template to one that does")
    return False


def warn_of_calls_left_out(tokenizer, problems: Iterable[Problem]) -> None:
    """Warns if the chat template leaves out calls or results of tools of the first prompt that has such messages."""
    prompt = next((problem.prompt for problem in problems if not isinstance(problem.prompt, str) and any(
        message.get("tool_calls") or message.get("role") == "tool" for message in problem.prompt)), None)
    if prompt and (lost := conversation.hidden(tokenizer, prompt, **ending(prompt))):
        warnings.warn(f"the chat template leaves out {lost} in the prompt {str(prompt)[:120]}, so the policy does not read it; "
                      "set config.model.chat_template to one that shows it, or write it into the text of a message",
                      RuntimeWarning, stacklevel=2)
