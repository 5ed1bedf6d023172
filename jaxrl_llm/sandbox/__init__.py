"""Programs that nobody trusts: run with no files, no network, no other processes, and within limits.

`sandbox.require()` says which of the ways to shut a program in works on this machine, `sandbox.run(program, mode=...)` runs
one. What is promised, and what is not, is in docs/security.md.
"""
from jaxrl_llm.sandbox.barriers import BARRIERS, Probe, best, probe, probes, require
from jaxrl_llm.sandbox.modes import MODES, NAMESPACES, Limits
from jaxrl_llm.sandbox.process import Finished, SandboxError, run

__all__ = ["BARRIERS", "MODES", "NAMESPACES", "Finished", "Limits", "Probe", "SandboxError", "best", "probe", "probes",
           "require", "run"]
