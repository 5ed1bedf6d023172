"""Runs of a method under several settings at once, that are built or make a step: `FILE [PORT PROCESS]`, see `main`."""
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl_llm import parallel
from jaxrl_llm.parallel import runtime
from jaxrl_llm.setup import setup
from jaxrl_llm.setup.config import default_config

sys.path.append(str(Path(__file__).parents[1]))

UNEQUAL = {"sampling.max_group": 8}  # rollouts of a prompt, by methods that give prompts unequal numbers of them
METHODS = {
    "grpo": {}, "dapo": {"sampling.max_draws": 2}, "ppo": {}, "poise": {}, "v0_5": UNEQUAL,
    "knapsack_rl": {**UNEQUAL, "budget.prompts": 12}, "dars": UNEQUAL, "sil": {}, "luffy": {}, "kimi_sampling": {}}
SETTINGS = {
    "environment": {"environment": "chatter:letters(replayable=True)", "sampling.max_tokens": 24, "sampling.max_turns": 2},
    "packed": {"learner.packed_rows": 8},
    "lora": {"lora.rank": 2},
    "slots": {"sampling.engine": "slots"},
    "experts": {"model.experts": 4, "objective": "+ balance(0.01)"},
    "int8": {"model.int8_cache": True},
    "fsdp": {"mesh.fsdp": 2},
    "tensor": {"mesh.tensor": 2},
    "seq": {"mesh.seq": 2},
    "mixture": {"task": "arithmetic(level=digit), arithmetic(level=add2, label=add2)"},
    "processes": {}}
LAG = {"schedule": "pipelined(lag=1)"}
# Rows of `tests/integration/test_rows_everywhere.py`, with what a tiny run of each needs.
ROWS = {
    "maxrl": {}, "sign_balance": {}, "bpo": {}, "sao": {"sampling.group": 1, "critic.pretrain_steps": 0}, "dppo": {},
    "dppo_kl": {}, "sapo": {}, "gmpo": {}, "vespo": {}, "ngu": {**UNEQUAL, "sampling.max_draws": 2}, "opo": {}, "gpg": {},
    "remax": {}, "optimal_token_baseline": {}, "gapo": {}, "luspo": {}, "klpo": {}, "best_of_group": {},
    "pass_at_k": {"estimator": "k=2", "sampling.group": 4}}
MESHED = {"fsdp", "tensor", "seq", "processes"}  # they need eight devices


def config_of(method: str, *settings: str):
    """The configuration of a run of one step, on all devices."""
    c = default_config()
    c.task, c.rewards = "arithmetic(level=digit)", "format(pattern='(?s).*[a-z].*')"  # half of what an untrained model writes
    c.model.chat_template = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
    c.model.hidden_size, c.model.num_layers, c.model.num_heads, c.model.mlp_size = 16, 1, 2, 16
    c.steps, c.prompts.per_step, c.prompts.max_tokens, c.learner.minibatches = 1, 8, 16, 1
    c.sampling.group, c.sampling.max_tokens, c.sampling.turn_tokens = 2, 4, 4
    c.optimizer.name, c.optimizer.learning_rate = "sgd", 0.1
    several = SETTINGS | {"lag": LAG}
    for changes in ({"method": method}, (METHODS | ROWS)[method], *(several[name] for name in settings)):
        c.update_from_flattened_dict(changes)
    return c


def answer(only_build: bool, method: str, *settings: str) -> str | None:
    """What is wrong with a run that is built, or that samples a batch and learns from it; None: nothing."""
    try:
        run, params = setup.build(config_of(method, *settings))
        return None if only_build else stepped(run, params)
    except Exception as error:  # the test shows all that is wrong
        return f"{type(error).__name__}: {error}"


def stepped(run, params) -> str | None:
    """What is wrong with the first batch of a run and what is learned from it; None: nothing."""
    state = setup.initial_state(run, params)
    before = parallel.fetch(state.params if state.lora is None else state.lora)
    steps = run.schedule.steps(run.source, run.learner, state, run.learner.frozen(state.params))
    step = next(step for step in steps if step.finished.rollouts is not None)
    state = step.learned.state
    after = parallel.fetch(state.params if state.lora is None else state.lora)
    if not all(np.isfinite(parallel.fetch(step.learned.metrics[name])) for name in ("loss", "grad_norm")):
        return f"loss or gradient is not finite: {step.learned.metrics}"
    changed = any((x != y).any() for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after)))
    return None if changed else "nothing is learned"


def main(file: str, port: str = "", process: str = "") -> None:
    """Answers the questions of a file, one a line."""
    with runtime.job(*((f"127.0.0.1:{port}", 2, int(process)) if port else ())):
        for line in Path(file).read_text().splitlines():
            only_build, names = json.loads(line)
            print("answer", json.dumps(answer(only_build, *names)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
