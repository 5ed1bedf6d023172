"""A server that accepts weights, and its clients; a server as a process."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from asking import MODEL, asking, collected, make_engine, make_worker, requests
from server import serving

from jaxrl_llm.engines.server import client as clients

ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def command(tmp_path):
    """Starts `jaxrl_llm serve`; `(its first line, the process)`."""
    started, path = [], os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

    def start(*arguments, **environment):
        process = subprocess.Popen([sys.executable, "-m", "jaxrl_llm.commands.cli", "serve", "--port=0", *arguments],
                                   cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   env=os.environ | {"PYTHONPATH": path, "LD_PRELOAD": ""} | environment)
        started.append(process)
        return process.stdout.readline(), process

    yield start
    for process in started:
        process.kill()
        process.communicate()
