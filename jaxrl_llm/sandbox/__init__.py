"""Runs untrusted programs with no files, no network, no other processes, and within limits.

`sandbox.require()` returns the sandbox mode that works on this machine, `sandbox.run(program, mode=...)` runs a program.
docs/security.md states what is guaranteed and what is not.
"""
from jaxrl_llm.sandbox.barriers import BARRIERS, BarrierReport, best, probe, probes, require
from jaxrl_llm.sandbox.modes import MODES, NAMESPACES, ResourceLimits
from jaxrl_llm.sandbox.process import ProgramResult, SandboxError, run

__all__ = ["BARRIERS", "MODES", "NAMESPACES", "BarrierReport", "ProgramResult", "ResourceLimits", "SandboxError", "best",
           "probe", "probes", "require", "run"]
