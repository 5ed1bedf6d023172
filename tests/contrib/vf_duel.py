"""An `Env` of verifiers for the tests: two agents say a number in turns, and the larger one wins."""
import verifiers.v1 as vf

__all__ = ["Duel", "Rounds"]


class RoundsConfig(vf.TasksetConfig):
    size: int = 8


class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        async with agents.first.interaction(task) as one, agents.second.interaction(task) as two:
            first = await one.turn()
            reply = await two.turn(f"The other says {first.last_reply}.")
            await one.turn(f"The other says {reply.last_reply}.")

    async def finalize(self, task, episode):
        last = {trace.agent.name: int(trace.last_reply or 0) for trace in episode.traces}
        for trace in episode.traces:
            trace.record_reward("larger", float(last[trace.agent.name] == max(last.values())), 1.0)


class Rounds(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], RoundsConfig]):
    def load(self):
        for number in range(self.config.size):
            yield vf.Task(vf.TaskData(prompt=f"Round {number}: say a number."), self.config.task)
