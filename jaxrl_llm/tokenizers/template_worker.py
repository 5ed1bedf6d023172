"""The inside of the process that renders chat templates: jinja2's sandbox, and limits that the kernel keeps.

A request (from the parent, trusted) is `marshal` data; a reply is one byte for its kind, `TEXT` or `ERROR`, and UTF-8. Each is
preceded by its length, 8 bytes. The parent never unmarshals what this process writes.
"""
import json
import marshal
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxrl_llm.tokenizers.renderer import ERROR, MARKS, OUTPUT_LIMIT, TEXT

MESSAGE_LIMIT = 2000  # characters of an error message


class Generation(Extension):
    """{% generation %} marks an assistant's turn for masks: a scope between two variables, which are empty if not set."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        scope = nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)
        begins, ends = (nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line) for name in MARKS)
        return [begins, scope, ends]


def raise_exception(message: str):
    raise TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON as models have seen it: jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compiled(template: str):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def line_of(error: Exception) -> int | None:
    """The line of the template where it happened, the innermost one."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, step = None, error.__traceback__
    while step is not None:
        line = step.tb_lineno if step.tb_frame.f_code.co_filename == "<template>" else line
        step = step.tb_next
    return line


def describe(error: Exception, memory_mb: int) -> str:
    """Text of an error, shortened, with its type if that is informative, and its line."""
    text = str(error.message if isinstance(error, TemplateSyntaxError) else error)
    if isinstance(error, MemoryError):
        text = f"more than {memory_mb} MiB are needed"
    name = "" if type(error) is TemplateError else f"{type(error).__name__}: "
    line = line_of(error)
    return (name + text)[:MESSAGE_LIMIT] + ("" if line is None else f" (line {line} of the template)")


def answer(request: bytes, memory_mb: int) -> bytes:
    """The reply to a request `(template, its variables)`."""
    try:
        template, variables = marshal.loads(request)
        text = compiled(template).render(variables)
        if len(text) > OUTPUT_LIMIT:
            raise TemplateError(f"the text has {len(text)} characters, the limit is {OUTPUT_LIMIT}")
        return TEXT + text.encode("utf-8", "surrogatepass")
    except Exception as error:
        compiled.cache_clear()  # a constant in the source may hold what memory there is
        return ERROR + describe(error, memory_mb).encode("utf-8", "surrogatepass")


def serve(cpu_seconds: float, memory_mb: int) -> None:
    """Answers requests from standard input until it closes; the first reply, an empty text, signals that this process is ready.

    The kernel ends the process at `cpu_seconds` of processor time in one request, whatever it does and whether or not the
    parent still lives.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    if sys.platform == "linux":  # others count what is mapped but never used, or refuse
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20,) * 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    reply = TEXT
    while True:
        unsent = memoryview(len(reply).to_bytes(8, "big") + reply)
        while unsent:
            unsent = unsent[os.write(replies, unsent) :]
        header = requests.read(8)
        if len(header) < 8:
            return
        request = requests.read(int.from_bytes(header, "big"))
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = answer(request, memory_mb)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
