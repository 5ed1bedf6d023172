"""Chat templates that hang, fill the memory, read their surroundings or fail: one error that names the prompt, in time."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from processes import eventually, marked

from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.tasks.base import Problem
from jaxrl_llm.tokenizers import ByteTokenizer
from jaxrl_llm.tokenizers.renderer import Renderer

MESSAGES = [{"role": "user", "content": "How many legs has a spider?"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + "{% endfor %}" * 3
linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="processes are found in /proc")


def failure(template, messages=MESSAGES, **variables):
    with pytest.raises(ValueError) as caught:
        ByteTokenizer(template).render_chat(messages, **variables)
    return str(caught.value)


@pytest.fixture
def renderer():
    renderer = Renderer(cpu_seconds=0.5, memory_mb=256)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("template", [
    "{{ 'a' * 10**10 }}",  # folded when it is compiled
    "{{ 'a' * (10**10 * messages | length) }}",
    "{{ '%0*d' % (10**10, 1) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a' | center(10**10) }}",
    "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
])  # fmt: skip
def test_memory_is_bounded(template):
    message = failure(template)
    assert "MemoryError: more than 1024 MiB are needed" in message and "How many legs has a spider?" in message


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}", "{{ n ** (n ** n) }}"])
def test_time_is_bounded(renderer, template):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"^more than 0.5 s of processor time are needed$"):
        renderer.render(template, {"n": 9})
    assert time.monotonic() - start < 30  # without the limit it takes days
    assert renderer.render("{{ x }}!", {"x": "fine"}) == "fine!"


@pytest.mark.slow
def test_a_tokenizer_renders_within_the_limit_of_time():
    assert "more than 5 s of processor time are needed. The messages: [{'content': 'How many legs" in failure(LOOPS)


def test_the_text_is_bounded():
    assert "the text has 16777217 characters, the limit is 16777216" in failure("{{ 'a' * 2**24 }}b")
    long = ByteTokenizer("{{ 'é' * (2**24 - 1) }}b").render_chat(MESSAGES)
    assert len(long) == 2**24 and long[-2:] == "éb"


@pytest.mark.parametrize(("template", "problem"), [
    ("a\n{{ 1 / 0 }}", "ZeroDivisionError: division by zero (line 2 of the template)"),
    ("a\n\n{{ 1 + 'a' }}", "TypeError: unsupported operand type(s) for +: 'int' and 'str' (line 3 of the template)"),
    ("{% include 'x' %}", "TypeError: no loader for this environment specified (line 1 of the template)"),
    ("{% macro f() %}\n{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth exceeded"),
    ("{{ a.b.c }}", "UndefinedError: 'a' is undefined (line 1 of the template)"),
    ("{{ 2.0 ** 99999 }}", "OverflowError: (34, 'Numerical result out of range') (line 1 of the template)"),
    ("{{ range(10**6) }}", "OverflowError: Range too big"),
    ("{{ messages[0]['content'].encode('nope') }}", "LookupError: unknown encoding: nope (line 1 of the template)"),
    ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "RecursionError"),
    ("a\n{% if %}", "TemplateSyntaxError: Expected an expression, got 'end of statement block' (line 2 of the template)"),
    ("\n{{ messages.append(1) }}", "SecurityError: access to attribute 'append' of 'list' object is unsafe. (line 2"),
    ("\n{{ raise_exception('y' * 10**7) }}", "y" * 2000 + " (line 2 of the template). The messages"),
    ("{{ raise_exception('roles\\nmust alternate') }}", "these messages: roles\nmust alternate (line 1 of the template). The"),
])  # fmt: skip
def test_every_failure_is_one_error_with_prompt_and_line(template, problem):
    message = failure(template)
    assert message.startswith("the chat template cannot render these messages: ") and problem in message
    assert message.endswith("The messages: [{'content': 'How many legs has a spider?', 'role': 'user'}]")
    assert len(message) < 2300
    with pytest.raises(ValueError, match=r"^prompt 7: the chat template cannot render"):
        encode_problem(Problem(MESSAGES, "8", id=7), ByteTokenizer(template))


def test_messages_that_are_no_data_name_the_prompt():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert "recursion" in failure("{{ messages }}", [{"role": "user", "content": nested}])
    itself = {"role": "user"}
    itself["content"] = itself
    assert "recursion" in failure("{{ messages }}", [itself])
    assert "hold a value of type PosixPath; allowed are text, numbers" in failure("{{ x }}", x=pathlib.PosixPath("/"))
    assert len(failure("{{ 1 / 0 }}", [{"role": "user", "content": "x" * 10**6}] * 1000)) < 600
    assert len(failure("", "x" * 10**6)) < 600


@linux
def test_a_process_that_was_killed_is_replaced(renderer, mark):
    assert renderer.render("a{{ x }}", {"x": 1}) == "a1"
    (first,) = marked(mark)
    os.kill(first, signal.SIGKILL)
    assert renderer.render("a{{ x }}", {"x": 2}) == "a2"
    assert first not in marked(mark) and len(marked(mark)) == 1
    renderer.close()
    assert marked(mark) == []
    assert renderer.render("a{{ x }}", {"x": 3}) == "a3"


@linux
def test_an_interrupted_caller_gets_no_reply_of_an_earlier_request(mark):
    def interrupt(*_):
        raise KeyboardInterrupt

    renderer, before = Renderer(), signal.signal(signal.SIGALRM, interrupt)
    try:
        assert renderer.render("ready", {}) == "ready"
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            renderer.render(LOOPS, {})
        assert renderer.render("next", {}) == "next" and len(marked(mark)) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
        renderer.close()


def test_threads_get_their_own_texts(renderer):
    texts: dict[int, list[str]] = {}

    def render(number):
        texts[number] = [renderer.render("{{ n }}-{{ i }}", {"n": number, "i": i}) for i in range(50)]

    threads = [threading.Thread(target=render, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [f"{number}-{i}" for i in range(50)] for number in range(4)}


PROGRAM = """
    import os, sys, threading
    from jaxrl_llm.tokenizers import ByteTokenizer
    chat = lambda template: ByteTokenizer(template).render_chat([{"role": "user", "content": "x"}])
    assert chat("{{ messages[0].content }}") == "x"
    child = os.fork()
    texts = {chat("%s{{ messages[0].content }}" % i) for i in range(200)} - {f"{i}x" for i in range(200)}
    if child == 0:
        os._exit(len(texts))
    assert not texts and os.waitpid(child, 0)[1] == 0, texts
    print("rendered", flush=True)
    if sys.argv[1] == "hang":
        chat(sys.argv[2])
"""


@linux
@pytest.mark.parametrize("end", ["exit", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_fork_has_a_process_of_its_own_and_nothing_outlives_the_program(mark, end):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), end, LOOPS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "rendered\n"
        if end == "hang":
            program.kill()  # while the process is busy: the kernel ends it at its limit of processor time
        assert program.wait(60) == (0 if end == "exit" else -signal.SIGKILL)
    assert eventually(lambda: not marked(mark), 60)
