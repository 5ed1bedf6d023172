"""Children of a process: from the kernel's file, and from a scan of all processes where there is no such file."""
import builtins
import os
import subprocess
import sys

import pytest

from jaxrl_llm.sandbox import children as of


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc")
def test_both_ways_name_the_children_and_no_grandchildren(monkeypatch):
    waits = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()']); print('up', flush=True); input()"
    command = [sys.executable, "-c", waits]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in started] == [b"up\n"] * 2
        below = [of.children(process.pid) for process in started]
        assert all(len(pids) == 1 for pids in below)

        def without_file(path, *arguments):
            if str(path).endswith("/children"):
                raise FileNotFoundError(path)
            return builtins.open(path, *arguments)

        kernel = of.children(os.getpid())
        monkeypatch.setattr(of, "open", without_file, raising=False)
        assert [of.children(process.pid) for process in started] == below
        assert {process.pid for process in started} <= set(kernel) & set(of.children(os.getpid()))
    finally:
        for process in started:
            process.communicate()  # the end of its input ends it and its child
    assert of.children(started[0].pid) == []
