"""GRPO steps of Hugging Face TRL on the work of `work.py`; one JSON line with `step_s` per step."""
import json
import os
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import MICRO, MODEL_DIR, STEPS, B, G, T, questions, score


class Clock(TrainerCallback):
    """Seconds of each whole step."""

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        print(json.dumps({"step_s": round(time.perf_counter() - self.began, 3)}), flush=True)


def reward(completions, answer, **_):
    return [score(completion[0]["content"], wanted) for completion, wanted in zip(completions, answer)]


torch.set_num_threads(os.cpu_count())
problems = [{"prompt": [{"role": "user", "content": q}], "answer": a} for step in questions() for q, a in step]
config = GRPOConfig(
    output_dir=os.environ["OUT_DIR"], max_steps=STEPS, use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"},
    per_device_train_batch_size=B * G // MICRO, gradient_accumulation_steps=MICRO, num_generations=G,
    max_completion_length=T, generation_kwargs={"min_new_tokens": T}, temperature=1.0, beta=0.0, loss_type="grpo",
    learning_rate=1e-6, lr_scheduler_type="constant", max_grad_norm=1e9, gradient_checkpointing=False,
    shuffle_dataset=False, seed=0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True)
GRPOTrainer(model=MODEL_DIR, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(problems),
            callbacks=[Clock()]).train()
