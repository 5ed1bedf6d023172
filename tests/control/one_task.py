"""The shares of a task without others."""
from jaxrl_llm.control.passes import Shares
from jaxrl_llm.tasks.loader import tasks_of


def alone(problems: int) -> Shares:
    """The shares of one task with this number of problems."""
    return Shares(*tasks_of(range(problems)))
