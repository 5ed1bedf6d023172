"""The tool `python`: programs of the policy in the sandbox."""
import dataclasses

from jaxrl_llm import sandbox
from jaxrl_llm.environments.tools import Result, Tool, ToolError, of_function


def python(*, deadline: float = 5.0, memory_mb: int = 512, unsafe: bool = False) -> Tool:
    """`python(code)` runs a program and returns its output. Every call is a fresh program.

    Raises SandboxError if a barrier of `jaxrl_llm.sandbox` does not hold on this machine, unless `unsafe`.
    """
    mode = sandbox.require(unsafe).mode
    limits = sandbox.ResourceLimits(seconds=deadline, memory_mb=memory_mb)

    def python(code: str) -> Result:
        """Runs a Python program and returns what it prints. Nothing is kept from one call to the next.

        Args:
            code: the program; print what you want to see
        """
        try:
            finished = sandbox.run(code, limits=limits, mode=mode)
        except ValueError as error:  # a program that cannot be sent
            raise ToolError(str(error)) from error
        return Result(_said(finished, limits), finished.status != "done" or finished.code != 0)

    return dataclasses.replace(of_function(python), program=True)


def _said(finished: sandbox.ProgramResult, limits: sandbox.ResourceLimits) -> str:
    """The output of a program, and its error if it failed."""
    printed, complaint = (text.decode(errors="replace").strip() for text in (finished.stdout, finished.stderr))
    if finished.status == "compile":
        return "error: the program is not valid Python"
    if finished.status == "timeout":
        return f"{printed}\nerror: the program was stopped after {limits.seconds:g} seconds".strip()
    if finished.status == "output":
        return f"{printed}\nerror: the program printed more than {limits.output_bytes} bytes".strip()
    if finished.code != 0:
        return f"{printed}\n{complaint or 'error: the program ended with code ' + str(finished.code)}".strip()
    return printed or "(nothing was printed)"
