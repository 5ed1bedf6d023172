"""A mark by which the processes of a test are found."""
import uuid

import pytest


@pytest.fixture
def mark(monkeypatch):
    """A variable in the environment of this process, which all that it starts from now on inherits."""
    text = uuid.uuid4().hex
    monkeypatch.setenv("JAXRL_LLM_TEST_MARK", text)
    return text
