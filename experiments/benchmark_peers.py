"""Seconds per GRPO step and peak memory against Hugging Face TRL and google-tunix, on the same work and machine.

  python experiments/benchmark_peers.py --model=DIR --trl=PYTHON --tunix=PYTHON [--work=8x8x24,2x4x24] [--json=out.json]

DIR and the two environments are made as experiments/peers/README.md says. The programs take turns, ours before and after each
peer; every one warms up for one step. Quote the ratios: seconds move with the machine.
"""
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

from jaxrl_llm.experiments.peers.timed import run

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory that all of them load.", required=True)
_TRL = flags.DEFINE_string("trl", None, "Python that has TRL; without it TRL is left out.")
_TUNIX = flags.DEFINE_string("tunix", None, "Python that has tunix; without it tunix is left out.")
_WORK = flags.DEFINE_list("work", ["8x8x24", "2x4x24"], "Prompts x rollouts x new tokens [x filler words of the prompt].")
_STEPS = flags.DEFINE_integer("steps", 5, "Timed steps of each program.", lower_bound=1)
_MICRO = flags.DEFINE_integer("micro", 1, "Micro-batches per update (the peers cannot do large work in one).")
_JSON = flags.DEFINE_string("json", None, "Also write the results to this file.")

HERE = Path(__file__).parent


def ours(work, steps: int) -> list[str]:
    prompts, group, tokens, words = work
    return [sys.executable, str(HERE / "benchmark.py"), f"--steps={steps}", "--nophases", f"--prompt_words={words}",
            f"--config.model.path={_MODEL.value}", f"--config.prompts.per_step={prompts}", f"--config.sampling.group={group}",
            f"--config.sampling.max_tokens={tokens}", f"--config.learner.micro_batches={_MICRO.value}"]


def compare(work, folder: Path) -> dict:
    """Results of every program on one piece of work, taking turns."""
    prompts, group, tokens, words = work
    environment = {"B": prompts, "G": group, "T": tokens, "PROMPT_WORDS": words, "STEPS": _STEPS.value + 1,
                   "MICRO": _MICRO.value, "MODEL_DIR": str(Path(_MODEL.value).absolute()), "OUT_DIR": folder / "trl"}
    environment = {name: str(value) for name, value in environment.items()}
    peers = {"trl": _TRL.value, "tunix": _TUNIX.value}
    half = -(-_STEPS.value // 2)
    turns = [("jaxrl_llm", ours(work, half))]
    for name, python in peers.items():
        if python:
            turns += [(name, [python, str(HERE / "peers" / f"{name}_grpo.py")]), ("jaxrl_llm", ours(work, half))]
    timings = {}
    for number, (name, command) in enumerate(turns):
        print(f"{time.strftime('%H:%M:%S')} {'x'.join(map(str, work))} {name} ...", flush=True)
        one = run(command, environment, folder / f"{number}_{name}.log")
        whole = timings.setdefault(name, {"step_s": [], "peak_gb": 0.0})
        whole["step_s"] += one["step_s"]
        whole["peak_gb"] = max(whole["peak_gb"], one["peak_gb"])
    return timings


def main(_):
    results = {}
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    print(f"logs: {folder}")
    for text in _WORK.value:
        work = tuple(int(n) for n in text.split("x"))
        if len(work) not in (3, 4):
            raise app.UsageError(f"--work={text}: give PROMPTSxROLLOUTSxTOKENS, or a fourth number of filler words")
        timings = compare(work if len(work) == 4 else (*work, 0), folder)
        base = statistics.median(timings["jaxrl_llm"]["step_s"])
        for name, one in timings.items():
            one["median_s"] = statistics.median(one["step_s"])
            one["ratio"] = one["median_s"] / base
            print(f"{text:>16} {name:10} {one['median_s']:8.2f} s ({min(one['step_s']):.2f} to {max(one['step_s']):.2f}, "
                  f"{len(one['step_s'])} steps)  x {one['ratio']:.2f}  {one['peak_gb']:.1f} GB", flush=True)
        results[text] = timings
        if _JSON.value:
            Path(_JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    app.run(main)
