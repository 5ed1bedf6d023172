r"""Programs in the text of a policy: blocks between fences, read in linear time.

A fence is three backticks that begin a line. What stands amid a line is the program's, such as `s = "```"`; so a closing fence
at the end of the program's last line counts only where no line begins with a fence behind it.
"""
import re

_OPEN = re.compile(r"```(?:python3?|py)[ \t\r]*\n", re.IGNORECASE)
_LAST = re.compile(r"```[ \t\r]*$", re.MULTILINE)
_FENCE = re.compile(r"^[ ]{0,3}```[ \t]*([^\s`]*)[ \t\r]*(?:\n|\Z)", re.MULTILINE)


def extract_program(completion: str) -> str | None:
    """The last closed block that is marked as Python, else the last closed one without a mark, or None."""
    program = python_block(completion)
    return _bare_block(completion) if program is None else program


def python_block(text: str) -> str | None:
    """The last closed block that begins with ```python, ```python3 or ```py, without the indentation of its fence; or None."""
    program, position, fences = None, 0, True
    while opened := _OPEN.search(text, position):
        before = text[text.rfind("\n", 0, opened.start()) + 1:opened.start()]
        indent = len(before) if before.isspace() else 0
        closed = re.compile(rf"^[ ]{{0,{indent + 3}}}```", re.MULTILINE).search(text, opened.end()) if fences else None
        fences = fences and closed is not None  # no later block has one either
        closed = closed or _LAST.search(text, opened.end())
        if closed is None:
            break
        program = text[opened.end():closed.start()].removesuffix("\n")
        if indent:
            program = re.sub(rf"^[ ]{{1,{indent}}}", "", program, flags=re.MULTILINE)
        again = _OPEN.match(text, closed.end() - 3)  # a block that was not closed, and the next
        position = again.start() if again else closed.end()
    return program


def last_opening(text: str, end: int) -> int:
    """Where the last fence of a Python program begins before `end`; -1 without one."""
    return max((fence.start() for fence in _OPEN.finditer(text, 0, end)), default=-1)


def _bare_block(text: str) -> str | None:
    """The last block that begins with a fence alone; what another language is named for is skipped."""
    program, language, begin = None, None, 0
    for fence in _FENCE.finditer(text):
        if language is None:
            language, begin = fence[1], fence.end()
        elif not fence[1]:
            program = program if language else text[begin:fence.start()].removesuffix("\n")
            language = None
    return program
