"""What a policy says to an environment with tools, and the mark of tests that run programs."""
import json

import pytest

from jaxrl_llm import sandbox

linux = pytest.mark.skipif(bool(sandbox.best().missing), reason="no sandbox with all barriers on this machine")


def say(text):
    return {"role": "assistant", "content": text}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
