"""Steps per second of games: arrays as text in runners of each kind and without text, and the first M of slow ones.

  python experiments/benchmark_games.py [--trajectories=64] [--repeats=3]

Random messages go to FrozenLake of gymnasium in threads and in processes, to that of gymnax in threads and compiled, and to
2048 of pgx. Ratios are relative to the first row of the same game. Rates do not include compilation. Without text 1 to 4096
games go at once. The last table is of environments whose steps take 10 to 40 ms, received as soon as M are ready.
"""
import random
import statistics
import time
from collections import Counter
from typing import Any

from absl import app, flags

_TRAJECTORIES = flags.DEFINE_integer("trajectories", 64, "Trajectories at once in the runners.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Batches of trajectories of each runner; the median counts.", lower_bound=1)

TURNS = 20
LAKE = ["left", "down", "right", "up"]
ROWS = (
    ("FrozenLake, gymnasium", "gymnasium_text", {"env_id": "FrozenLake-v1", "actions": LAKE, "turns": TURNS}, "threads"),
    ("FrozenLake, gymnasium", "gymnasium_text", {"env_id": "FrozenLake-v1", "actions": LAKE, "turns": TURNS}, "processes"),
    ("FrozenLake, gymnax", "gymnax_game", {"game": "FrozenLake-misc", "turns": TURNS}, "threads"),
    ("FrozenLake, gymnax", "gymnax_game", {"game": "FrozenLake-misc", "turns": TURNS}, "compiled"),
    ("2048, pgx", "pgx_game", {"game": "2048", "turns": TURNS}, "threads"),
    ("2048, pgx", "pgx_game", {"game": "2048", "turns": TURNS}, "compiled"),
)
SECONDS = (0.01, 0.02, 0.04, 0.01) * 2  # of a step of each slow environment
SLOW_STEPS = 800


def played(runner, first: int) -> tuple[int, float]:
    """Steps of a batch of trajectories with random messages, and the seconds that they and the resets took."""
    chance, problems = random.Random(first), runner.environment.task.train
    start, steps = time.perf_counter(), 0
    turns = runner.reset({first + i: problems[i % len(problems)] for i in range(_TRAJECTORIES.value)})
    while going := [uid for uid, turn in turns.items() if not turn.done]:
        turns = runner.step({uid: {"role": "assistant", "content": chance.choice(LAKE)} for uid in going})
        steps += len(going)
    seconds = time.perf_counter() - start
    runner.forget()
    return steps, seconds


def text_rates() -> list[dict[str, Any]]:
    """A row for each runner."""
    from jaxrl_llm.environments.runner import Runner

    rows: list[dict[str, Any]] = []
    for name, target, options, kind in ROWS:
        runner = Runner(target, options, seed=0, kind=kind)
        played(runner, 0)  # compiles, starts processes
        counts = [played(runner, (1 + i) * _TRAJECTORIES.value) for i in range(_REPEATS.value)]
        runner.close()
        rate = statistics.median(steps / seconds for steps, seconds in counts)
        first = next((row["steps a second"] for row in rows if row["game"].split(",")[0] == name.split(",")[0]), rate)
        rows.append({"game": name, "runner": kind, "steps a second": rate, "ratio": rate / first})
    return rows


def array_rates() -> list[dict[str, Any]]:
    """A row for each number of games: random legal moves, with resets, in one compiled loop."""
    import jax

    from jaxrl_llm import environments
    from jaxrl_llm.environments.compiled import opening_of
    from jaxrl_llm.environments.episodes import rollout

    opening, rows = opening_of(environments.make("pgx_game", game="2048")), []
    assert opening is not None
    for count in (1, 16, 256, 4096):
        steps = max(2**15 // count, 16)
        start = time.perf_counter()
        compiled = rollout.lower(opening.game, jax.random.key(0), count, steps).compile()
        seconds = [time.perf_counter() - start]
        for repeat in range(_REPEATS.value):
            start = time.perf_counter()
            jax.block_until_ready(compiled(jax.random.key(repeat)))
            seconds.append(time.perf_counter() - start)
        rows.append({"games of 2048": count, "steps a second": count * steps / statistics.median(seconds[1:]),
                     "seconds to compile": seconds[0]})
    return rows


def slow():
    """An environment whose steps take the `SECONDS` of its problem."""
    from jaxrl_llm.environments import Environment, Turn
    from jaxrl_llm.tasks.base import seeded

    said = [{"role": "user", "content": "Go on."}]

    def step(state, message):
        time.sleep(SECONDS[state])
        return Turn(said)

    return Environment(name="slow", task=seeded("slow", "Go on.", len(SECONDS), 1), step=step,
                       reset=lambda problem, key: (problem.id, said))


def pool_rates() -> list[dict[str, Any]]:
    """A row for each number of results that are waited for: measured and simulated rates."""
    from jaxrl_llm.environments.pool_times import pool_times
    from jaxrl_llm.environments.runner import Runner

    count, rows = len(SECONDS), []
    for batch in (count, count // 2, count // 4):
        runner = Runner(f"{__name__}:slow", seed=0, kind="threads", workers=count)
        problems, steps = runner.environment.task.train, Counter[int]()
        turns = runner.reset({row: problems[row] for row in range(count)})
        start = time.perf_counter()
        runner.send(dict.fromkeys(turns, {"role": "assistant", "content": "left"}))
        for _ in range(SLOW_STEPS // batch):
            turns = runner.recv(batch)
            steps.update(turns.keys())
            runner.send(dict.fromkeys(turns, {"role": "assistant", "content": "left"}))
        rate = steps.total() / (time.perf_counter() - start)
        runner.close()
        simulated = pool_times(lambda row, step: SECONDS[row], count, batch=batch, workers=count, policy=0.0,
                               batches=SLOW_STEPS // batch)
        rows.append({"waits for": f"{batch} of {count}", "steps a second": rate, "simulated": simulated.rate,
                     "steps of the quickest to the slowest": steps[0] / steps[2]})
    return rows


def main(_):
    from jaxrl_llm.commands.command_line import print_table

    print_table(text_rates(), f"{_TRAJECTORIES.value} trajectories as text, up to {TURNS} messages each")
    print_table(array_rates(), "without text")
    print_table(pool_rates(), f"the first of {len(SECONDS)} environments whose steps take {min(SECONDS)} to {max(SECONDS)} s")


if __name__ == "__main__":
    app.run(main)
