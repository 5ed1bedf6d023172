"""Recipes of the tinker cookbook, started from the command line as its users do, on the command `jaxrl_llm serve`."""
import json
import os
import subprocess
import sys

import jax
import pytest
from server import MODEL, params

from jaxrl_llm.models import weights

pytest.importorskip("tinker_cookbook")
CONVERSATIONS = [{"messages": [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": a * 3}]} for a in "abcd"]


@pytest.fixture
def recipe(tmp_path, command):
    """Runs a recipe on a served byte model; the lines of its metrics."""
    weights.save_hf(tmp_path / "tiny", MODEL.config, jax.device_get(params()))
    name = "saved/tokenizer"  # also where the server writes the tokenizer
    line, _ = command("--tinker", "--model=tiny", "--tokenizer=bytes", f"--name={name}", "--checkpoints=saved", "--slots=4",
                      "--slot_tokens=256", "--rank=4")
    url = line.split()[3].rstrip(",")

    def run(module, *options):
        words = [sys.executable, "-m", f"tinker_cookbook.recipes.{module}", f"base_url={url}", f"model_name={name}",
                 "renderer_name=role_colon", "lora_rank=4", "log_path=log", "behavior_if_log_dir_exists=resume", *options]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500, env=os.environ | {
            "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": ""})
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(one) for one in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]

    return run


@pytest.mark.slow
def test_supervised_learning_lowers_the_loss_and_continues_after_its_checkpoint(recipe, tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CONVERSATIONS)))

    def losses(epochs):
        lines = recipe("chat_sl.train", "dataset=chats.jsonl", "batch_size=4", "learning_rate=0.02", "lr_schedule=constant",
                       "save_every=2", "eval_every=0", f"num_epochs={epochs}")
        return [line["train_mean_nll"] for line in lines if "train_mean_nll" in line]

    first = losses(4)
    assert len(first) == 4 and first[-1] < 0.8 * first[0]
    whole = losses(6)
    assert whole[:4] == first and len(whole) == 6 and whole[-1] < first[-1]


@pytest.mark.slow
def test_reinforcement_learning_on_its_arithmetic(recipe, tmp_path):
    lines = recipe("math_rl.train", "env=arithmetic", "loss_fn=importance_sampling", "groups_per_batch=2", "group_size=4",
                   "max_steps=2", "save_every=1", "eval_every=0")
    steps = [line for line in lines if "env/all/reward/total" in line]
    assert len(steps) == 2 and all(abs(line["optim/kl_sample_train_v1"]) < 1e-4 for line in steps)
    saved = [json.loads(line) for line in (tmp_path / "log/checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["state_path"].startswith("tinker://") and saved[-1]["sampler_path"].endswith("/sampler_weights/final")
