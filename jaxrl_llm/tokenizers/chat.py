"""Chat templates: jinja2 source from a checkpoint, rendered in a sandbox with the names such templates expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
) -> str:
    """The text of a conversation; `messages` is a list of {"role": ..., "content": ...}.

    Templates come with a checkpoint and are not trusted: they run sandboxed and cannot change what they are given.
    Raises ValueError for malformed messages, for a template that does not compile and for one that refuses them.
    """
    from jinja2 import TemplateError

    if isinstance(messages, (str, Mapping)) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, got {messages!r}")
    known = {"tools": None, "documents": None, **variables}
    try:
        return _compiled(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
    except TemplateError as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str):
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks an assistant's turn for those who make masks from text; here it is only a scope."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja's own filter escapes <, > and & for HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
