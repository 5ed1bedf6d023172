"""A server that accepts weights, and its clients."""

import pytest
from asking import MODEL, asking, collected, make_engine, make_worker, requests
from server import serving

from jaxrl_llm.generation.external import client as clients


@pytest.fixture(scope="module")
def worker():
    return make_worker()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def url(worker, folder):
    with serving(worker, config=MODEL.config, weights_from=folder) as at:
        yield at


@pytest.fixture
def server(url, folder):
    with asking(url, folder, deadline=60) as result:
        yield result


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(clients, "_FIRST", 0.01)


@pytest.fixture(scope="module")
def healthy(url, folder):
    """12 trajectories of a server without faults."""
    with asking(url, folder) as server:
        engine = make_engine(server)
        engine.submit(*requests(range(12)))
        return collected(engine)
