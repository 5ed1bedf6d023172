"""Symbolic equality by math-verify. Imported by worker processes only, at their start, outside any deadline."""

import logging

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off: the pool has one


def symbolic_equal(answer: str, given: str) -> bool:
    """Whether math-verify judges `given` equal to the reference `answer`; unreadable texts are unequal."""
    # Its timer uses signals, which work in main threads only and cannot stop every computation, so it is turned off.
    read = [parse(rf"\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in (answer, given)]
    return bool(verify(*read, timeout_seconds=None, raise_on_error=True))


symbolic_equal("x+1", "1+x")  # loads everything that the first call needs
