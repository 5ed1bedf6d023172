"""A taskset of verifiers for the tests: a tool opens one of three drawers for a coin; rewards, a metric and a stop."""
import verifiers.v1 as vf

__all__ = ["Drawers"]


class DrawersConfig(vf.TasksetConfig):
    size: int = 12


class DrawersData(vf.TaskData):
    answer: str


class Opened(vf.State):
    opened: list[int] = []


class Furniture(vf.Toolset[vf.ToolsetConfig, Opened]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.coin = int(task.answer)

    @vf.tool
    async def open_drawer(self, number: int) -> str:
        """Opens a drawer, from 1 to 3."""
        if not 1 <= number <= 3:
            raise ValueError("there is no such drawer")
        self.state.opened.append(number)
        return "A coin." if number == self.coin else "Dust."


class DrawersTask(vf.Task[DrawersData, Opened, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Furniture(vf.ToolsetConfig())]

    @vf.reward
    async def named(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def quick(self, trace) -> float:
        return float(len(trace.state.opened) == 1)

    @vf.metric
    async def drawers(self, trace) -> float:
        return float(len(trace.state.opened))

    @vf.stop
    async def too_many(self, trace: vf.Trace) -> bool:
        return len(trace.state.opened) >= 4


class Drawers(vf.Taskset[DrawersTask, DrawersConfig]):
    def load(self):
        for number in range(self.config.size):
            yield DrawersTask(DrawersData(prompt=f"Where is coin {number}?", system_prompt="Open drawers.",
                                          answer=str(number % 3 + 1)), self.config.task)
