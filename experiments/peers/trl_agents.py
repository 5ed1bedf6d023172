"""GRPO steps of Hugging Face TRL with an environment, on the work of `agent_work.py`; one JSON line with `step_s` per step.

With the argument `template` it prints the chat template instead, which both programs take: SmolLM2's own shows no tools.
"""
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["HF_HUB_OFFLINE"] = "1"
import trl

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
if sys.argv[1:] == ["template"]:
    print(json.dumps(TEMPLATE))
    sys.exit()

import torch
from agent_work import CALL, Calculator, distinct
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from work import MICRO, MODEL_DIR, STEPS, B, G, T, questions

TURNS, TOKENS = int(os.environ["TURNS"]), int(os.environ["TOKENS"])
parse = grpo_trainer.parse_response


def called(tokenizer, ids, **context):
    """What was sampled, parsed, and then replaced by the call."""
    parse(tokenizer, ids, **context)
    return parse(tokenizer, tokenizer(CALL)["input_ids"] + [tokenizer.eos_token_id], **context)


class Clock(TrainerCallback):
    """Seconds of each whole step, and the tokens that the model learned from, tool output included."""

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        print(json.dumps({"step_s": round(time.perf_counter() - self.began, 3)}), flush=True)

    def on_log(self, args, state, control, logs, **_):
        kept = {name: logs[name] for name in ("completions/mean_length", "tools/call_frequency", "tools/failure_frequency")
                if name in logs}
        print(json.dumps(kept), flush=True)


def reward(completions, **_):
    return [distinct(json.dumps(completion)) for completion in completions]


torch.set_num_threads(os.cpu_count())
grpo_trainer.parse_response = called
tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, chat_template=TEMPLATE, padding_side="left")
tokenizer.chat_template = TEMPLATE
problems = [{"prompt": [{"role": "user", "content": q}], "answer": a} for step in questions() for q, a in step]
config = GRPOConfig(
    output_dir=os.environ["OUT_DIR"], max_steps=STEPS, use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"},
    per_device_train_batch_size=B * G // MICRO, gradient_accumulation_steps=MICRO, num_generations=G,
    max_completion_length=TOKENS, max_tool_calling_iterations=TURNS - 1,
    generation_kwargs={"min_new_tokens": T, "max_new_tokens": T}, temperature=1.0, beta=0.0, loss_type="grpo",
    learning_rate=1e-6, lr_scheduler_type="constant", max_grad_norm=1e9, gradient_checkpointing=False, shuffle_dataset=False,
    seed=0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
GRPOTrainer(model=MODEL_DIR, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer, environment_factory=Calculator, callbacks=[Clock()]).train()
