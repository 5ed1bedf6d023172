"""Seconds per phase of a step."""
import contextlib
import time
from collections.abc import Iterator


class PhaseTimer:
    """Wall seconds per phase of a step: `with timer("rollout"): ...`, then `timer.collect()` once per step.

    JAX returns before the device is done: wait for the result (`jax.block_until_ready`) inside the block, or the time
    of one phase is counted in the next.
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._open: str | None = None
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if self._open is not None:
            raise ValueError(f"phase {phase!r} begins inside {self._open!r}: nested phases would be counted twice")
        self._open, start = phase, time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self._open = None

    def collect(self) -> dict[str, float]:
        """Seconds since the last call as time/<phase> and the rest as time/other: together the wall time."""
        now = time.perf_counter()
        elapsed = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        elapsed["time/other"] = max(0.0, now - self._start - sum(self._seconds.values()))
        self._seconds, self._start = {}, now
        return elapsed
