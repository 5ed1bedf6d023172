"""A small run folder, written with the trainer's own writers; the policy in it is hostile."""
import json
from pathlib import Path

from jaxrl_llm.runs.metrics import MetricWriter
from jaxrl_llm.runs.samples import write_samples
from jaxrl_llm.setup.config import default_config
from jaxrl_llm.store.workdir import open_workdir

HOSTILE = ("</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
           "&lt;\x1b[31m\udc80\u202e")


def make_run(path: Path, steps: int = 30, **settings) -> Path:
    """A run of `steps` steps with an evaluation every 10, 2 prompts x 2 completions sampled at steps 0 and 10."""
    config = default_config()
    config.steps = steps
    for key, value in settings.items():
        config[key] = value
    open_workdir(path, config).record()
    with MetricWriter(path) as writer:
        for step in range(steps + 1):
            metrics = {"time/rollout": 2.0, "time/update": 1.0}
            if step:
                metrics |= {"reward/mean": step / steps, "completion/length": 4.0, "entropy": 2.0 / (1 + step),
                            "time/step": 3.0, "grad_norm": 10.0 ** (step % 4), "value/pearson": float("nan")}
            if step % 10 == 0:
                metrics |= {"eval/score": 0.02 * step, "eval/score_low": 0.02 * step - 0.01,
                            "eval/score_high": 0.02 * step + 0.01}
            writer.write(step, metrics)
    for step in (0, 10):
        write_samples(path, step, ["2+3=", HOSTILE], ["5", "<b>"], [["5", "6"], [HOSTILE, "ok"]],
                      [[1.0, 0.0], [0.5, float("nan")]],
                      [[{"exact": 1.0}, {"exact": 0.0}], [{"exact": 0.5}, {"exact": 0.25}]], [[2, 2], [9, 3]],
                      [["stop", "length"], ["stop", "stop"]])
    return path


def with_tokens(path: Path, step: int) -> None:
    """Adds per-token numbers to the rows of a step: two tokens each."""
    file = path / "samples" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    extra = {"tokens": ["<i>", HOSTILE], "logprobs": [-0.5, -1.25], "entropies": [0.125, 2.0], "advantages": [1.0, -1.0],
             "ratios": [1.1, float("nan")]}
    file.write_text("".join(json.dumps(row | extra) + "\n" for row in rows))


def with_messages(path: Path, step: int) -> None:
    """Makes the completions of a step conversations: a call of a tool, what the tool says, an answer; the tool is hostile."""
    file = path / "samples" / f"step_{step:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    extra = {"messages": [{"role": "assistant", "content": "so <tool_call>{\"name\": \"add\"}</tool_call>", "reward": 0.25},
                          {"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "5", "reward": float("nan")}],
             "tokens": ["so", HOSTILE, "5"], "trained": [True, False, True], "entropies": [0.5, 0.0, 1.0]}
    file.write_text("".join(json.dumps(row | extra) + "\n" for row in rows))
