"""Trains a language model by reinforcement learning with verifiable rewards, or on texts (SFT, DPO).

  python experiments/train.py --config=configs/arithmetic.py --workdir=runs/first [--config.method=dr_grpo ...] [--resume]
"""
from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Configuration file, e.g. configs/arithmetic.py or configs/arithmetic.py:smollm2.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, local or gs://BUCKET/FOLDER: config, metrics, curves, "
                               "samples, checkpoints.")
_RESUME = flags.DEFINE_bool("resume", False, "Continue the run in --workdir from its last good checkpoint.")
_WARM_STARTS = flags.DEFINE_string("warm_starts", None, "Folder in which runs with equal supervised warm-ups share the weights "
                                   "after them, as those of experiments/compare.py do.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0, for processes that are started by hand.")
_PROCESSES = flags.DEFINE_integer("processes", None, "Number of the processes that are started by hand.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of these processes this is, from 0.", lower_bound=0)
_MULTIHOST = flags.DEFINE_bool("multihost", False, "Join the other processes of the job, as the cluster tells them (TPU "
                               "slices, Kubernetes; SLURM and Open MPI are recognised without it).")


def main():
    from jaxrl_llm.parallel import runtime
    from jaxrl_llm.runs.loop import train
    from jaxrl_llm.runs.report import print_report
    from jaxrl_llm.store.workdir import folder_of
    with runtime.job(_COORDINATOR.value, _PROCESSES.value, _PROCESS_ID.value, _MULTIHOST.value):
        evaluations = train(_CONFIG.value, _WORKDIR.value, resume=_RESUME.value, warm_starts=_WARM_STARTS.value)
        if runtime.is_primary():
            print_report(evaluations, folder_of(_WORKDIR.value))


if __name__ == "__main__":
    command_line.run(main, "config", "workdir")
