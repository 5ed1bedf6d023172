"""Set before jax is imported: the CPU, quick compiling, no windows, one cache of compiled programs for all processes."""
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import resource
import sys
import tempfile
import time

import psutil
import pytest

# Models are compared with those of transformers, which needs PyTorch.
collect_ignore = [] if importlib.util.find_spec("torch") else [
    "models", "tokenizers/test_gguf_tokenizer.py", "learning/test_balance.py"]
_compiled = tempfile.TemporaryDirectory(prefix="jaxrl_llm_compiled_")  # removed when the session ends
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if int(importlib.metadata.version("jaxlib").split(".")[1]) < 11:  # later ones refuse flags that they have dropped
    _quick.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(_quick))  # compiling tiny programs is what takes time: these need a third of it
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the hundreds of processes compiles all modules again
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
gc.set_threshold(200_000, 50, 100)  # tracing allocates much and leaves little garbage, for which the default looks often
_ENOUGH = 0.7e9  # bytes that compiled programs may add to a process before they are dropped
_start = [0.5e9]  # bytes of the process after they were dropped last


def drop_programs():
    """Compiled programs add up to gigabytes; what is needed again lies in the cache on disk."""
    if psutil.Process().memory_info().rss > _start[0] + _ENOUGH and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        _start[0] = psutil.Process().memory_info().rss


@pytest.fixture(scope="module", autouse=True)
def programs_of_a_module():
    """After each module, as runs within one notice what compiles again."""
    yield
    drop_programs()


@pytest.fixture(autouse=True)
def programs_of_a_test(request):
    """After each test of the rooms of pure functions and of whole runs, whose modules alone compile more than fits."""
    yield
    if request.path.parent.name in ("advantages", "control", "objectives", "properties", "values") or (
            request.path.name in ("test_train.py", "test_gradient_norm_runs.py")):
        drop_programs()


def pytest_collection_finish(session):
    """Keeps the garbage collector from reading thousands of tests and modules again and again; figures are drawn once."""
    gc.collect()
    gc.freeze()
    if (loop := sys.modules.get("jaxrl_llm.runs.loop")) is not None:
        loop.plot_curves = drawn_once(loop.plot_curves)


def drawn_once(plot_curves):
    """`plot_curves` that draws the first figure with given panels in this process, and copies it for the runs after it.

    To draw takes as long as the steps of a tiny run; `tests/runs/test_plots.py` looks at what is drawn.
    """
    from matplotlib.figure import Figure

    from jaxrl_llm.runs import plots

    drawn = {}

    def plot(metrics_path, out_png, phases=()):
        titles = (title for title, _ in plots._panels(plots.read_metrics(metrics_path)))
        panels = (Figure.savefig, *phases, *titles)  # or a broken one
        if panels in drawn:
            out_png.write_bytes(drawn[panels])
            return out_png
        written = plot_curves(metrics_path, out_png, phases)
        drawn[panels] = written.read_bytes()
        return written

    return plot


# Machines of continuous integration differ by a factor of two and end a job at its limit whatever it has tested.
_MINUTES = "JAXRL_LLM_TEST_MINUTES"  # of a session, after which no slow test begins; the summary counts those left out
_END = "JAXRL_LLM_TEST_END"  # the same as a time of the clock, for all processes of the session


def pytest_runtest_setup(item):
    if time.time() > float(os.environ.get(_END, "inf")) and item.get_closest_marker("slow"):
        pytest.skip(f"{os.environ[_MINUTES]} minutes have passed")


_peaks: list[tuple[int, str]] = []  # the most memory of this process in bytes, of the tests that needed most


def peak_memory() -> int:
    """The most bytes of this process since the last call, where the system tells; else since its start."""
    try:
        with open("/proc/self/status") as status:
            kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except (OSError, StopIteration):
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * 1024


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    _peaks[:] = sorted([*_peaks, (peak_memory(), item.nodeid)], reverse=True)[:3]


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["peaks"] = _peaks


class _Peaks:
    """Reports the largest processes of the session, which CONTRIBUTING bounds, and what the time did not suffice for."""

    def __init__(self):
        self.workers = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.workers += getattr(node, "workeroutput", {}).get("peaks", [])

    def pytest_terminal_summary(self, terminalreporter):
        late = sum("minutes have passed" in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
        if late:
            terminalreporter.write_line(f"{late} slow tests were left out: {os.environ[_MINUTES]} minutes had passed; "
                                        f"run them where there is more time, or without {_MINUTES}")
        for size, test in sorted(map(tuple, self.workers or _peaks), reverse=True)[:3]:
            terminalreporter.write_line(f"largest process: {size / 1e9:.2f} GB, in {test}")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        if _MINUTES in os.environ:
            os.environ[_END] = str(time.time() + 60 * float(os.environ[_MINUTES]))
        config.pluginmanager.register(_Peaks())
