"""Runs every method of agents in a small environment made for it, and writes what came of it as a table.

  python experiments/agent_rows.py --out=runs/agent_rows [--rows=gigpo,spiral] [--steps=20] [--seeds=1] [--write=docs/agents.md]

A policy of 2 layers first imitates the oracle of its environment a little, once for all methods there; each method
continues from these weights for --steps steps. Runs that are finished are not run again, others begin anew. A table holds
all that is finished, also in other calls.
"""
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from jaxrl_llm.commands import command_line

_OUT = flags.DEFINE_string("out", None, "Folder of the runs.", required=True)
_ROWS = flags.DEFINE_list("rows", [], "Methods to run; empty: all.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps of each run.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of each method.", lower_bound=1)
_WRITE = flags.DEFINE_string("write", None, "Page whose table, between its marks, is written anew.")
_RUN = flags.DEFINE_bool("run", True, "Run what is not finished; --norun only writes the table.")

BEGIN, END = "<!-- table of experiments/agent_rows.py -->", "<!-- end of the table -->"


class World(NamedTuple):
    """A small environment (or task), and how a policy is warmed up there: `config` names a file of configs/."""

    config: str
    changes: dict[str, Any]


class Row(NamedTuple):
    """A method in a world, with what it needs beyond that."""

    method: str
    world: str
    changes: dict[str, Any] = {}


_CALLS = {"sampling.max_turns": 3, "sampling.max_tokens": 224, "prompts.per_step": 8, "warmup.steps": 900,
          "optimizer.learning_rate": 2e-4}  # at the rate of the config these small batches make the policy worse
WORLDS = {
    "treasure": World("game", {"warmup.steps": 150}),
    "calculator": World("tools", _CALLS),
    "purified calculator": World("tools", {
        **_CALLS, "environment": "purified(options={'options': {'level': 'mul2'}})", "sampling.turn_tokens": 96,
        "sampling.max_tokens": 320}),
    "calculator with a memory": World("tools", {
        **_CALLS, "environment": "memory_use(options={'level': 'mul2'}, parser=llama3, contexts=3)", "sampling.max_turns": 5,
        "sampling.max_tokens": 192}),
    "walks through treasure": World("game", {
        "environment": "walked(environment=treasure, options={'size': 2, 'brief': True})", "warmup.steps": 150,
        "warmup.strays": 0.0}),
    "treasure, last turns only": World("game", {
        "environment": "recent(environment=treasure, options={'size': 2, 'brief': True}, contexts=8)", "warmup.steps": 150}),
    "tic-tac-toe": World("game", {
        "environment": "tic_tac_toe(brief=True)", "sampling.turn_tokens": 4, "sampling.max_tokens": 128, "warmup.steps": 150}),
    "solver and verifier": World("game", {
        "environment": "solver_verifier(options={'level': 'digit'})", "sampling.turn_tokens": 6, "sampling.max_tokens": 128,
        "sampling.max_turns": 3, "warmup.steps": 200}),
    "chain of skills": World("game", {
        "environment": "skill_chain(size=64, heldout=16)", "sampling.turn_tokens": 160, "sampling.max_tokens": 1024,
        "prompts.max_tokens": 512, "prompts.per_step": 4, "warmup.steps": 200}),
    "ranked films": World("game", {
        "environment": "ranked_list(brief=True)", "sampling.turn_tokens": 40, "sampling.max_tokens": 40,
        "sampling.max_turns": 1, "warmup.steps": 600}),
    "boxes on screens": World("game", {
        "environment": "", "task": "grounding(elements=1, size=64)", "sampling.max_tokens": 24, "prompts.max_tokens": 128,
        "warmup.steps": 400, "warmup.batch": 32, "warmup.strays": 0.0}),
    "patches": World("game", {
        "environment": "", "task": "edits(files=1, size=64, heldout=16, brief=True)", "sampling.max_tokens": 160,
        "prompts.max_tokens": 128, "warmup.steps": 300, "warmup.strays": 0.0}),
}
ROWS = (
    *(Row(name, "treasure") for name in ("gigpo", "hgpo", "salt", "agentgym_rl")),
    Row("archer", "treasure", {"critic.pretrain_steps": 5, "critic.learning_rate": 1e-3}),
    Row("scaling_inter_rl", "treasure", {"controllers": "turns=(4, 6, 8), every=5"}),
    Row("tti", "treasure", {"controllers": "least=4, most=8, every=5"}),
    Row("turn_control", "treasure", {"controllers": "steps=5", "sampling.max_tokens": 480}),
    *(Row(name, "calculator") for name in ("simpletir", "simpletir_filter", "verltool", "echo", "table_gpt_r1",
                                           "aepo_advantage", "aepo_clip")),
    Row("rstar2_roc", "calculator", {"estimator": "train_rollouts=4, min_negative=1, min_positive=1"}),  # of groups of 8
    Row("spear", "calculator", {"replay_objective": "warmup=10", "controllers": "decay=10"}),  # of 200 steps each in the paper
    Row("rapo_steps", "calculator", {
        "environment": "tool_use(options={'level': 'mul2'}, parser=llama3, turns=2, kinds={'calculator': 'query'})"}),
    Row("cleaner_saar", "purified calculator"),
    *(Row(name, "calculator with a memory") for name in ("multi_context_grpo", "memsearcher")),
    Row("markov_multi_turn", "treasure, last turns only"), Row("ui_s1", "walks through treasure"),
    Row("spiral", "tic-tac-toe"), Row("advevo_baseline", "tic-tac-toe"), Row("dr_mas", "solver and verifier"),
    Row("sage_skills", "chain of skills"), Row("rank_grpo", "ranked films"), Row("gui_g1_weights", "boxes on screens"),
    Row("swe_rl_reward", "patches"), Row("b_coder", "patches", {"critic.pretrain_steps": 5, "critic.learning_rate": 1e-3}),
)


def config_of(world: World, changes: dict[str, Any]):
    """The configuration of runs in this world."""
    import importlib
    c = importlib.import_module(f"jaxrl_llm.configs.{world.config}").get_config()
    with c.unlocked():
        c.update_from_flattened_dict({"eval.problems": 32, "eval.every": 0, "checkpoint.every": 0, "samples_every": 0,
                                      **world.changes, **changes})
    return c


def config_of_row(row: Row, seed: int, steps: int):
    """The configuration of a run of this row, from new weights; a run gets those of `warmed`."""
    return config_of(WORLDS[row.world], {"method": row.method, "seed": seed, "steps": steps, "warmup.steps": 0, **row.changes})


def warmed(name: str, folder: Path) -> str:
    """The run whose weights methods of this world start from, made where it is not there."""
    from jaxrl_llm.runs import loop
    start = folder / "start" / name.replace(" ", "_").replace(",", "")
    if not finished(start, 1):
        shutil.rmtree(start, ignore_errors=True)
        method = next(row.method for row in ROWS if row.world == name)  # some worlds refuse methods that others take
        loop.train(config_of(WORLDS[name], {"method": method, "phases": "all", "steps": 1, "optimizer.learning_rate": 0.0,
                                            "eval.problems": 1}), start)
    return str(start)


def finished(run: Path, steps: int) -> dict[str, dict[str, float]] | None:
    """The first and the last line of a run's metrics, if it has made its steps."""
    from jaxrl_llm.store.lines import FILE_NAME
    file = run / FILE_NAME
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {"start": lines[0], "end": lines[-1]} if lines and lines[-1]["step"] == steps and "eval/score" in lines[-1] else None


def folder_of(row: Row, seed: int) -> Path:
    return Path(_OUT.value) / f"{row.method}-{_STEPS.value}-{seed}"


def run(row: Row, seed: int) -> None:
    """One run of a method, unless it is finished."""
    from jaxrl_llm.runs import loop
    folder = folder_of(row, seed)
    if finished(folder, _STEPS.value):
        return
    config = config_of_row(row, seed, _STEPS.value)
    config.model.path = warmed(row.world, Path(_OUT.value))
    shutil.rmtree(folder, ignore_errors=True)  # one that was interrupted begins anew
    print(f"--- {row.method}, seed {seed}", flush=True)
    loop.train(config, folder)


def table() -> str:
    """What is finished, one line for a method."""
    def share(line: dict[str, float]) -> str:
        mean, low, high = (100 * line[f"eval/score{side}"] for side in ("", "_low", "_high"))
        return f"{mean:.1f} ({low:.1f} to {high:.1f})"

    lines = ["| method | where | steps | seeds | before, % | after, % |", "|---|---|---|---|---|---|"]
    for row in ROWS:
        runs = [done for seed in range(_SEEDS.value) if (done := finished(folder_of(row, seed), _STEPS.value))]
        if runs:
            before, after = (", ".join(share(one[name]) for one in runs) for name in ("start", "end"))
            lines.append(f"| `{row.method}` | {row.world} | {_STEPS.value} | {len(runs)} | {before} | {after} |")
    return "\n".join(lines)


def write(page: Path) -> None:
    """The page with the table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


def main():
    from jaxrl_llm.tools.registry import one_of
    rows = [row for row in ROWS if not _ROWS.value or row.method in _ROWS.value]
    for name in _ROWS.value:
        one_of("method of agents", name, [row.method for row in ROWS])
    failed = []
    for seed in range(_SEEDS.value if _RUN.value else 0):
        for row in rows:
            try:
                run(row, seed)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                failed.append(f"{row.method}, seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                print(failed[-1], flush=True)
            if _WRITE.value:
                write(Path(_WRITE.value))
    if _WRITE.value:
        write(Path(_WRITE.value))
    print(table())
    if failed:
        raise SystemExit("\n".join(["these failed:", *failed]))


if __name__ == "__main__":
    command_line.run(main)
