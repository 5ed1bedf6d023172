"""Writes the model of a run folder for other programs: transformers, vLLM, PEFT.

  python experiments/export.py --workdir=runs/first --out=models/first [--step=100] [--dtype=bfloat16]
  python experiments/export.py --workdir=runs/lora --out=models/adapter --adapter        # the adapter alone, as PEFT reads it
"""

from absl import flags

from jaxrl_llm.commands import command_line

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run of experiments/train.py.")
_OUT = flags.DEFINE_string("out", None, "Folder of the model; made if absent.")
_STEP = flags.DEFINE_integer("step", None, "The checkpoint of this step; default: the newest.")
_BEST = flags.DEFINE_bool("best", False, "The weights that config.checkpoint.best kept, in the place of a checkpoint.")
_AVERAGE = flags.DEFINE_bool("average", False, "The moving average that config.optimizer.ema kept, in the place of weights.")
_ADAPTER = flags.DEFINE_bool("adapter", False, "Write the adapter of a run with lora.rank alone, not merged into the weights.")
_DTYPE = flags.DEFINE_enum("dtype", None, ("float32", "bfloat16", "float16"), "Precision of the files; default: "
                           "model.dtype of the run, and float32 with --adapter.")


def main():
    from jaxrl_llm.runs.trained import export
    from jaxrl_llm.store import bucket
    workdir, out = (bucket.place(folder) for folder in (_WORKDIR.value, _OUT.value))
    with bucket.kept(out) as (folder, _):
        step = export(workdir, folder, _STEP.value, _ADAPTER.value, _BEST.value, _AVERAGE.value, _DTYPE.value or "")
    print(f"wrote step {step} to {out}")


if __name__ == "__main__":
    command_line.run(main, "workdir", "out")
