"""Packed updates of TRL's `SFTTrainer` on the texts of `text_work.py`; one JSON line with `step_s` for each, of all texts."""
import json
import os
import time

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from datasets import Dataset
from text_work import from_environment
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer, pack_dataset


class Clock(TrainerCallback):
    """Seconds of each whole step."""

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        print(json.dumps({"step_s": round(time.perf_counter() - self.began, 3)}), flush=True)


torch.set_num_threads(os.cpu_count())
row = int(os.environ["ROW"])
rows = Dataset.from_list([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in from_environment()])
config = SFTConfig(
    output_dir=os.environ["OUT_DIR"], max_steps=int(os.environ["STEPS"]), use_cpu=True, bf16=False, packing=True,
    max_length=row, model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=1, learning_rate=1e-5,
    lr_scheduler_type="constant", gradient_accumulation_steps=len(pack_dataset(rows, row)), max_grad_norm=1e9,
    gradient_checkpointing=False, shuffle_dataset=False, seed=0, logging_steps=1, save_strategy="no", report_to="none",
    disable_tqdm=True)
SFTTrainer(model=os.environ["MODEL_DIR"], args=config, train_dataset=rows, callbacks=[Clock()]).train()
