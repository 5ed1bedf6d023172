"""A mark that identifies the processes of a test."""
import uuid

import pytest


@pytest.fixture
def mark(monkeypatch):
    """A variable in the environment of this process, which all its later child processes inherit."""
    text = uuid.uuid4().hex
    monkeypatch.setenv("JAXRL_LLM_TEST_MARK", text)
    return text
