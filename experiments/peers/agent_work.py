"""The multi-turn work that agents are timed on: turns of T tokens, behind each but the last a call of a calculator.

Untrained models call when they like. Equal work is had by ignoring stop tokens and by answering whatever was sampled as if it
had been `CALL`; what was sampled is parsed all the same. Needs neither this library nor a peer.
"""
import time
import zlib

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 34"}}\n</tool_call>'


class Calculator:
    """An environment in the shape of TRL's `environment_factory`. `seconds`: how long a call takes."""

    seconds = 0.0

    def reset(self, **row) -> None:
        """Nothing is kept."""

    def calculator(self, expression: str) -> str:
        """Multiplies two numbers.

        Args:
            expression: for instance 3 * 4
        """
        time.sleep(self.seconds)
        left, right = expression.split("*")
        return str(int(left) * int(right))


def distinct(text: str) -> float:
    """A reward in [0, 1) that no two texts share, so that no group is without a signal."""
    return zlib.crc32(text.encode()) / 2**32
