"""The tool `python`: programs of the policy in the sandbox."""
import dataclasses

from jaxrl_llm import sandbox
from jaxrl_llm.environments.tools import Result, Tool, ToolError, of_function, shorten


def python(*, deadline: float = 5.0, memory_mb: int = 512, unsafe: bool = False, brief: int = 0) -> Tool:
    """`python(code)` runs a program and returns its output. Every call is a fresh program.

    With `brief` the policy reads at most so many characters of the output, and as many of the last line of an error (SimpleTIR,
    arXiv 2509.02479, has 512). Raises ValueError for fewer than 0, SandboxError if a barrier of `jaxrl_llm.sandbox` does not
    hold on this machine, unless `unsafe`.
    """
    if brief < 0:
        raise ValueError(f"brief={brief} characters of an output; give 1 or more, or 0: all lines of the error")
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
        return Result(_said(finished, limits, brief), finished.status != "done" or finished.code != 0)

    return dataclasses.replace(of_function(python), program=True)


def _said(finished: sandbox.ProgramResult, limits: sandbox.ResourceLimits, brief: int) -> str:
    """The output of a program, and its error if it failed."""
    printed, complaint = (text.decode(errors="replace").strip() for text in (finished.stdout, finished.stderr))
    if brief:
        printed, complaint = shorten(printed, brief), shorten(complaint.rpartition("\n")[2], brief)
    if finished.status == "compile":
        return "error: the program is not valid Python"
    if finished.status == "timeout":
        return f"{printed}\nerror: the program was stopped after {limits.seconds:g} seconds".strip()
    if finished.status == "output":
        return f"{printed}\nerror: the program printed more than {limits.output_bytes} bytes".strip()
    if finished.code != 0:
        return f"{printed}\n{complaint or 'error: the program ended with code ' + str(finished.code)}".strip()
    return printed or "(nothing was printed)"
