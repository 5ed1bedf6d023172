"""Seconds per step of multi-turn GRPO against Hugging Face TRL's `environment_factory`, on the same work and machine.

  python experiments/benchmark_agents.py --model=DIR --trl=PYTHON [--prompts=4 --group=8 --turns=4 --tokens=32 --micro=4]
  python experiments/benchmark_agents.py --model=DIR --trl=PYTHON --alone --seconds=1          # calls that take a second

DIR and the environment of TRL are made as experiments/peers/README.md says. Every turn has the same number of tokens and every
turn but the last calls a calculator (experiments/peers/agent_work.py). The programs take turns, ours before and after; every
one warms up for one step. --alone runs this library by itself: one JSON line per step with the seconds in which the device
waited for environments, their share of the step, and how many tokens sampling computed for each token that there is.
"""
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory that both load.", required=True)
_TRL = flags.DEFINE_string("trl", None, "Python that has TRL, from which the chat template comes too.", required=True)
_PROMPTS = flags.DEFINE_integer("prompts", 4, "Prompts of a step.", lower_bound=1)
_GROUP = flags.DEFINE_integer("group", 8, "Trajectories of a prompt.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 4, "Turns of a trajectory.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 32, "Tokens of a turn.", lower_bound=1)
_MICRO = flags.DEFINE_integer("micro", 1, "Micro-batches per update.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 3, "Timed steps of each program.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.0, "How long a call of the tool takes.", lower_bound=0.0)
_STOPPING = flags.DEFINE_float("stopping", 0.0, "Share of the vocabulary that ends a turn: turns of unequal length.",
                               lower_bound=0.0, upper_bound=1.0)
_ALONE = flags.DEFINE_bool("alone", False, "This library by itself, in this process.")
_TEMPLATE = flags.DEFINE_string("template", None, "File of the chat template, where it was asked for before.")
_JSON = flags.DEFINE_string("json", None, "Also write the results to this file.")

PEERS = Path(__file__).parent / "peers"


@dataclasses.dataclass(frozen=True)
class Unstopped:
    """A tokenizer of which other tokens end a turn."""

    inner: object
    stop_ids: tuple[int, ...]

    def __getattr__(self, name):
        return getattr(self.inner, name)


def template_of_trl() -> str:
    if _TEMPLATE.value:
        return Path(_TEMPLATE.value).read_text()
    asked = [_TRL.value, str(PEERS / "trl_agents.py"), "template"]
    return json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def tokens_behind(template: str) -> int:
    """Tokens of a trajectory behind its prompt: the policy's, and the answers of the tool as the template writes them."""
    from jaxrl_llm import tokenizers
    from jaxrl_llm.tokenizers import conversation
    tokenizer = tokenizers.load(_MODEL.value, template)
    message = {"role": "tool", "name": "calculator", "content": "408"}
    answer = conversation.extend(tokenizer, tokenizer.encode("word"), [message])
    return _TURNS.value * _TOKENS.value + (_TURNS.value - 1) * len(answer)


def build(template: str, tokens: int):
    """`(run, state)` of this library."""
    from jaxrl_llm.configs import arithmetic
    from jaxrl_llm.sampling.dialogue import Dialogue
    from jaxrl_llm.setup import setup
    c = arithmetic.get_config("smollm2")
    c.model.path, c.model.chat_template = _MODEL.value, template
    c.environment = f"jaxrl_llm.experiments.peers.forced_calls:forced(turns={_TURNS.value}, seconds={_SECONDS.value})"
    c.prompts.per_step, c.sampling.group, c.optimizer.learning_rate = _PROMPTS.value, _GROUP.value, 1e-6
    c.learner.micro_batches = _MICRO.value
    c.sampling.max_turns, c.sampling.turn_tokens, c.sampling.max_tokens = _TURNS.value, _TOKENS.value, tokens
    run, params = setup.build(c)
    stops = tuple(range(round(_STOPPING.value * run.learner.policy.model.config.vocab_size)))
    stream = run.source.stream
    tokenizer, partner = Unstopped(stream.tokenizer, stops), stream.partner
    assert isinstance(partner, Dialogue)
    stream = stream.apart(tokenizer=tokenizer, stop_ids=stops, partner=dataclasses.replace(partner, tokenizer=tokenizer))
    run = dataclasses.replace(run, source=dataclasses.replace(run.source, stream=stream))
    return run, setup.initial_state(run, params)


def alone() -> None:
    """Steps of this library: one JSON line each, the first one compiles."""
    from jaxrl_llm.tools.timer import PhaseTimer
    template = template_of_trl()
    run, state = build(template, tokens_behind(template))
    for _ in range(_STEPS.value + 1):
        timer, began = PhaseTimer(), time.perf_counter()
        finished = run.source.next(run.learner.publish(state), timer)
        state = run.learner.learn(state, finished.rollouts, timer=timer).state
        seconds, times, metrics = time.perf_counter() - began, timer.collect(), finished.metrics
        phases = {name.removeprefix("time/"): round(x, 3) for name, x in times.items()}
        print(json.dumps({"step_s": round(seconds, 3), **phases, "idle": round(times["time/wait"] / seconds, 4),
                          "computed": round(metrics["completion/computed"], 4), "tokens": metrics["completion/tokens"],
                          "present": metrics["completion/present"]}), flush=True)


def compare() -> dict:
    """Results of both programs, taking turns."""
    from jaxrl_llm.experiments.peers.timed import run
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    template = template_of_trl()
    (folder / "template.jinja").write_text(template)
    environment = {"B": _PROMPTS.value, "G": _GROUP.value, "T": _TOKENS.value, "TURNS": _TURNS.value, "PROMPT_WORDS": 0,
                   "MICRO": _MICRO.value, "TOKENS": tokens_behind(template) + 8, "STEPS": _STEPS.value + 1,
                   "OUT_DIR": folder / "trl", "MODEL_DIR": Path(_MODEL.value).absolute()}
    environment = {name: str(value) for name, value in environment.items()}
    half = -(-_STEPS.value // 2)
    own = [sys.executable, __file__, "--alone", f"--template={folder / 'template.jinja'}", f"--steps={half}",
           *(f"--{name}={flags.FLAGS[name].value}"
             for name in ("model", "trl", "prompts", "group", "turns", "tokens", "micro", "compilation_cache"))]
    results: dict[str, dict] = {}
    print(f"logs: {folder}")
    for number, (name, command) in enumerate([("jaxrl_llm", own), ("trl", [_TRL.value, str(PEERS / "trl_agents.py")]),
                                              ("jaxrl_llm", own)]):
        print(f"{time.strftime('%H:%M:%S')} {name} ...", flush=True)
        one = run(command, environment, folder / f"{number}_{name}.log")
        whole = results.setdefault(name, {"step_s": [], "peak_gb": 0.0})
        whole["step_s"] += one["step_s"]
        whole["peak_gb"] = max(whole["peak_gb"], one["peak_gb"])
    return results


def main():
    if _ALONE.value:
        alone()
        return
    if _SECONDS.value or _STOPPING.value:
        raise ValueError("--seconds and --stopping change the work of this library alone; give --alone as well")
    results = compare()
    base = statistics.median(results["jaxrl_llm"]["step_s"])
    for name, one in results.items():
        one["median_s"] = statistics.median(one["step_s"])
        one["ratio"] = one["median_s"] / base
        print(f"{name:10} {one['median_s']:8.2f} s ({min(one['step_s']):.2f} to {max(one['step_s']):.2f}, {len(one['step_s'])} "
              f"steps)  x {one['ratio']:.2f}  {one['peak_gb']:.1f} GB", flush=True)
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    command_line.run(main)
