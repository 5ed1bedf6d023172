"""Run folders in the trainer's format, with made-up metrics."""
import json
import os
import subprocess
import sys
from pathlib import Path

from jaxrl_llm.compare import plan
from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.setup import config as config_lib
from jaxrl_llm.setup.resolve import resolve
from jaxrl_llm.store.lock import at_home
from jaxrl_llm.store.workdir import Workdir, resolve_config

ROOT = Path(__file__).parents[2]


def command_of(out, *arguments):
    """`experiments/compare.py` as arguments of a process: `args` and `env`."""
    cache = f"--compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
    return {"args": [sys.executable, str(ROOT / "experiments/compare.py"), cache, f"--out={out}", *arguments],
            "env": os.environ | {"PYTHONPATH": str(ROOT)}}


def started(out, *arguments):
    """Runs `experiments/compare.py` in a process of its own."""
    return subprocess.run(**command_of(out, *arguments), capture_output=True, text=True, timeout=600)


def base(**changes):
    config = config_lib.default_config()
    config.model.hidden_size, config.model.num_layers, config.model.num_heads, config.model.mlp_size = 16, 1, 2, 32
    config.prompts.per_step, config.sampling.group, config.sampling.max_tokens = 4, 2, 8
    config.task, config.steps = "arithmetic(level=digit)", 4
    config.update_from_flattened_dict(changes)
    return config


def write_run(job, budget, scores, *, length=5.0, seconds=2.0, draws=None, every=2, samples=True, more=None):
    """Held-out `scores` at steps 0, every, 2 every ...; the first step compiles for a hundred seconds."""
    config = plan.run_config(job, budget)
    resolved = resolve_config(resolve(config, plan.methods.get(config.method).defaults))
    Workdir(at_home(job.folder), False, resolved, []).record()
    with MetricWriter(job.folder) as writer:
        for step in range((len(scores) - 1) * every + 1):
            line = {name: scores[step // every] for name in ("eval/score", "eval/solved")} if step % every == 0 else {}
            if step:
                line |= {"completion/length": length, "time/step": 100.0 if step == 1 else seconds, "time/rollout": 0.5,
                         "time/update": 1.0, "entropy": 0.5, "reward/mean": 0.3,
                         "trained/rollouts": config.prompts.per_step * config.sampling.group}
                line |= ({"filter/draws": draws} if draws else {}) | (more or {})
            writer.write(step, line)
            if samples and step % every == 0:
                page = job.folder / "samples" / f"step_{step:06d}.jsonl"
                page.parent.mkdir(exist_ok=True)
                rows = [{"prompt_index": p, "components": {"exact": float((p + g + step) % 3 == 0), "format": 1.0},
                         "solved": (p + g + step) % 3 == 0}
                        for p in range(3) for g in range(config.sampling.group)]
                page.write_text("".join(json.dumps(row) + "\n" for row in rows))
