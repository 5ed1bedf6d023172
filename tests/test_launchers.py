"""The launchers: a dry run prints the real commands, wrong options are refused, and restarts end as they should."""
import importlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCHERS = ("scripts/keep_training.sh", "scripts/launch_tpu_pod.sh", "scripts/slurm.sbatch")
VM = ("vm", "--name=a", "--type=v6e-8", "--zone=z")
TRAIN = ("--config=configs/arithmetic.py", "--config.objective=clip_high=0.28, dual_clip=3", "--workdir=/mnt/a's")


def bash(script, *options, **variables):
    return subprocess.run(["bash", str(ROOT / script), *options], capture_output=True, text=True, cwd=ROOT, timeout=60,
                          env=os.environ | variables)


def program(folder: Path, name: str, body: str) -> Path:
    """An executable of this name that runs `body`."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", LAUNCHERS)
def test_scripts_parse_and_tell_their_usage(script):
    assert subprocess.run(["bash", "-n", str(ROOT / script)]).returncode == 0
    for options in ((), ("--help",)):
        answer = bash(script, *options)
        assert answer.returncode == 0 and answer.stdout.startswith(("Trains", "usage")) and "xit codes: " in answer.stdout
        assert "set -" not in answer.stdout and "#!" not in answer.stdout


def test_a_dry_run_of_a_tpu_vm_prints_its_commands():
    answer = bash("scripts/launch_tpu_pod.sh", "--dry-run", *VM, "--project=p", "--spot", "--", *TRAIN)
    assert answer.returncode == 0 and not answer.stderr
    archive, state, delete, create, copy, start, follow = answer.stdout.splitlines()
    assert archive == "tar czf /tmp/a.tar.gz --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./models ."
    assert state == ("state=$(gcloud compute tpus tpu-vm describe a --zone=z --project=p --format='value(state)' 2> /dev/null "
                     "|| true)")
    assert delete == ("case $state in PREEMPTED|TERMINATED) gcloud compute tpus tpu-vm delete a --zone=z --project=p --quiet; "
                      "state= ;; esac")
    assert create == ('[ -n "$state" ] || gcloud compute tpus tpu-vm create a --zone=z --project=p --accelerator-type=v6e-8 '
                      "--version=v2-alpha-tpuv6e --spot")
    assert copy == "gcloud compute tpus tpu-vm scp /tmp/a.tar.gz a: --zone=z --project=p --worker=all"
    assert start.startswith("gcloud compute tpus tpu-vm ssh a --zone=z --project=p --worker=all --command='mkdir -p jaxrl_llm ")
    checked, kept = start.split("keep_training.sh ")[1:]
    assert checked.startswith("--dry-run --mounted --config=configs/arithmetic.py ") and "setsid nohup" in checked
    assert kept.startswith("--mounted --config=configs/arithmetic.py ") and follow.startswith("# follow it: gcloud")
    assert "nfs" not in start and "bash scripts/setup.sh tpu,data,tasks && " in start  # data sets are what recipes read


def test_dry_runs_start_agents_on_a_node_and_on_a_pod():
    node = ("--config=configs/agent.py:qwen2.5_7b-h100-8", "--workdir=gs://bucket/agent")
    printed = bash("scripts/slurm.sbatch", "--dry-run", *node).stdout
    assert f"srun bash scripts/keep_training.sh {' '.join(node)}\n" in printed and "source scripts/setup.sh gpu,gs\n" in printed
    assert bash("scripts/keep_training.sh", "--dry-run", "--mounted", *node).stdout == (
        f"python experiments/train.py {' '.join(node)}\n")
    pod = ("vm", "--name=a", "--type=v5p-16", "--zone=z", "--nfs=10.0.0.2:/share", "--", "--workdir=gs://bucket/agent",
           "--config=configs/agent.py:qwen3_30b_a3b-v5p-16")
    refused = bash("scripts/launch_tpu_pod.sh", "--dry-run", *pod)
    assert refused.returncode == 2 and "add --config.model.path=/mnt/SHARE/models/..." in refused.stderr
    answer = bash("scripts/launch_tpu_pod.sh", "--dry-run", *pod, "--config.model.path=/mnt/share/models/Qwen3-30B-A3B")
    start = answer.stdout.splitlines()[-2]
    assert answer.returncode == 0 and "setup.sh tpu,data,tasks,gs && " in start and "install -d" not in start
    assert start.count("--workdir=gs://bucket/agent --config=configs/agent.py:qwen3_30b_a3b-v5p-16 "
                       "--config.model.path=/mnt/share/models/Qwen3-30B-A3B --multihost") == 2


@pytest.mark.parametrize("state, verbs", (
    ("", "describe create scp ssh"), ("READY", "describe scp ssh"), ("PREEMPTED", "describe delete create scp ssh"),
    ("TERMINATED", "describe delete create scp ssh"), ("fails", "describe create")))
def test_a_machine_that_was_preempted_is_made_again(tmp_path, state, verbs):
    """A stand-in for gcloud that reports this state of the machine, or no machine."""
    program(tmp_path, "tar", "true")
    program(tmp_path, "gcloud", f"""
        echo "$4" >> {tmp_path}/verbs
        if [ "$4" = describe ]; then [ {state or "absent"} != absent ] && echo {state.replace("fails", "")}; fi
        [ "$4 {state}" != "create fails" ]""")
    done = bash("scripts/launch_tpu_pod.sh", *VM, "--spot", "--", *TRAIN, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode == 0) == (state != "fails"), done.stderr
    assert (tmp_path / "verbs").read_text().split() == verbs.split()


def test_shared_files_are_mounted_on_every_host():
    where = ("--nfs=10.0.0.2:/share", "--", TRAIN[0], "--workdir=/mnt/share/a")
    answer = bash("scripts/launch_tpu_pod.sh", "--dry-run", *VM, *where).stdout
    assert "{ mountpoint -q /mnt/share || " in answer and "sudo mount -t nfs 10.0.0.2:/share /mnt/share; }; }" in answer
    assert answer.index("mount -t nfs") < answer.index("sudo install -d -o $(id -u) /mnt/share/a") < answer.index("--mounted")


def test_a_folder_on_the_disk_of_the_machine_is_refused_there(tmp_path):
    """The last existing folder above it decides; a stand-in for df reports that its file system is mounted at /, or below."""
    program(tmp_path, "df", f'echo "$2" > {tmp_path}/asked; echo Mounted; echo "$TARGET"')
    def keep(target):
        return bash("scripts/keep_training.sh", "--dry-run", "--mounted", f"--workdir={tmp_path}/new/run", PYTHON="py",
                    PATH=f"{tmp_path}:{os.environ['PATH']}", TARGET=target)
    refused, kept = keep("/"), keep("/mnt/share")
    assert refused.returncode == 2 and not refused.stdout and "sudo mount -t nfs SERVER:/SHARE" in refused.stderr
    assert kept.returncode == 0 and kept.stdout == f"py experiments/train.py --workdir={tmp_path}/new/run\n"
    assert (tmp_path / "asked").read_text().strip() == str(tmp_path)


def test_a_run_executes_the_commands_of_a_dry_run(tmp_path):
    """Stand-ins for the programs record their arguments."""
    for name in ("gcloud", "tar", "xpk"):
        program(tmp_path, name, f'printf "%s\\n" "$0 $#" "$@" >> {tmp_path}/calls; [ "$4" != describe ]')
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert bash("scripts/launch_tpu_pod.sh", *VM, "--", *TRAIN, **path).returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert calls.count("gcloud ") == 4 and "\ncreate\na\n--zone=z\n--accelerator-type=v6e-8\n" in calls
    remote = calls.split("--command=")[1].splitlines()[0]  # the command for the machine's shell, quoted once more
    program(tmp_path, "setsid", 'shift 3; printf "%s\\n" "$@"')
    words = subprocess.run(["bash", "-c", remote[remote.index("{ setsid"):].replace(">> train.log", "")], capture_output=True,
                           text=True, env=os.environ | path, cwd=tmp_path).stdout.splitlines()
    assert words == ["--mounted", *TRAIN]
    (tmp_path / "calls").unlink()
    gke = ("xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i")
    assert bash("scripts/launch_tpu_pod.sh", *gke, "--", *TRAIN, **path).returncode == 0
    printed = bash("scripts/launch_tpu_pod.sh", "--dry-run", *gke, "--", *TRAIN).stdout
    xpk = (tmp_path / "calls").read_text().splitlines()
    assert {"--workload=a", "--cluster=c", "--tpu-type=v6e-8", "--docker-image=i", "--max-restarts=50"} <= set(xpk)
    assert printed.startswith("xpk workload create --workload=a --cluster=c --project=p --zone=z --tpu-type=v6e-8 ")
    command = next(line for line in xpk if line.startswith("--command=")).removeprefix("--command=")
    assert command.startswith("exec bash scripts/keep_training.sh --mounted --config=configs/arithmetic.py --config.objective=")


@pytest.mark.parametrize("options, answer", (
    (("pod", *VM[1:], "--", *TRAIN), "the first word is vm or xpk, not 'pod'"),
    (("vm", "--name=a", "--zone=z", "--", *TRAIN), "--type=... is missing"),
    (("xpk", *VM[1:], "--project=p", "--image=i", "--", *TRAIN), "--cluster=... is missing"),
    (("xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i", "--spot", "--", *TRAIN), "--spot is for vm"),
    ((*VM, "--slices=2", "--", *TRAIN), "--slices is for xpk; a TPU VM is one slice"),
    (("xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i", "--slices=0", "--", *TRAIN), "--slices=0 is no number"),
    ((*VM, *TRAIN), "unknown option --config=configs/arithmetic.py"),
    (VM, "come after --"),
    ((*VM, "--", TRAIN[0]), "--workdir=... is missing"),
    (("vm", "--name=a", "--type=h100-8", "--zone=z", "--", *TRAIN), "unknown type 'h100-8'"),
    (("--dry-run", *VM, "--", TRAIN[0], "--workdir=runs/a"), "lies on the disk of a host"),
    ((*VM, "--", TRAIN[0], "--workdir=/tmp/a"), "or mount storage of all hosts and give a folder in it: --nfs=SERVER:/SHARE"),
    ((*VM, "--", TRAIN[0], "--workdir=s3://bucket/a"), "is a URL to which several hosts cannot write; give --workdir=gs://BUCKET"),
    ((*VM, "--", TRAIN[0], "--workdir=gs://bucket"), "is a URL to which several hosts cannot write"),
    (("--dry-run", *VM, "--", "--config=configs/gsm8k.py", "--workdir=gs://r/a"), "=/mnt/SHARE/models/..."),
    ((*VM, "--nfs=10.0.0.2:/share", "--", *TRAIN), "is not in /mnt/share, where --nfs=10.0.0.2:/share is mounted"),
    ((*VM, "--nfs=/share", "--", *TRAIN), "--nfs=/share is no SERVER:/SHARE"),
    (("xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i", "--", "--workdir=/home/a"), "xpk storage attach"),
    (("xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i", "--nfs=h:/s", "--", *TRAIN), "--nfs is for vm"),
    ((*VM, "--", "--config=configs/gsm8k.py:qwen3_4b-v5e-8", "--workdir=/mnt/runs/a"), "--config.model.path=/mnt/runs/models"),
    (("--dry-run", *VM, "--", "--config=configs/gsm8k.py", "--workdir=/mnt/r/a"), "add --config.model.path=/mnt/r/models/...;"),
    (("--dry-run", *VM, "--", "--config=word_problems", "--workdir=/mnt/r/a"), "add --config.model.path=/mnt/r/models/...;"),
    (("--dry-run", *VM, "--", "--config=distill:qwen3_4b-v5e-8", "--config.model.path=/mnt/m", "--workdir=/mnt/r/a"),
     "add --config.teacher.path=/mnt/r/models/...;"),
    ((*VM, "--", *TRAIN, "--config.teacher.base=runs/t"), "--config.teacher.base=runs/t lies beside this script"),
    ((*VM, "--", *TRAIN, "--config.model.path=models/x"), "--config.model.path=models/x lies beside this script"),
    ((*VM, "--", *TRAIN, "--config.teacher.path=runs/t"), "--config.teacher.path=runs/t lies beside this script"),
))
def test_an_impossible_launch_is_refused(options, answer):
    result = bash("scripts/launch_tpu_pod.sh", *options, PATH="/usr/bin:/bin")
    assert result.returncode == 2 and answer in result.stderr and not result.stdout


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py") if path.stem != "suite"))
def test_launches_need_the_paths_of_what_a_recipe_reads_in_models(recipe):
    """Against the paths of the default variant's configuration."""
    config = importlib.import_module(f"jaxrl_llm.configs.{recipe}").get_config()
    wanted = [f"--config.{key}" for key, path in (("model.path", config.model.path), ("teacher.path", config.teacher.path))
              if path.startswith("models/")]
    for form in (recipe, f"configs/{recipe}.py"):
        result = bash("scripts/launch_tpu_pod.sh", "--dry-run", *VM, "--", f"--config={form}", "--workdir=/mnt/runs/a")
        assert re.findall(r"(--config\.[a-z.]+)=/mnt/runs/models", result.stderr) == wanted
        assert result.returncode == (2 if wanted else 0), result.stderr


def test_weights_on_the_storage_of_all_hosts_are_taken():
    recipe = ("--config=configs/gsm8k.py:qwen3_4b-v5e-8", "--config.model.path=/mnt/runs/models/x", "--workdir=/mnt/runs/a")
    assert "--config.model.path=/mnt/runs/models/x" in bash("scripts/launch_tpu_pod.sh", "--dry-run", *VM, "--", *recipe).stdout


def test_the_hosts_of_a_larger_slice_find_each_other():
    for kind, several in (("v5p-8", False), ("v5p-64", True), ("v6e-8", False), ("v6e-16", True)):
        answer = bash("scripts/launch_tpu_pod.sh", "--dry-run", "vm", "--name=a", f"--type={kind}", "--zone=z", "--", *TRAIN)
        assert answer.returncode == 0 and ("--multihost" in answer.stdout) == several, kind


def test_several_slices_are_one_job():
    gke = ("--dry-run", "xpk", *VM[1:], "--project=p", "--cluster=c", "--image=i")
    answer = bash("scripts/launch_tpu_pod.sh", *gke, "--slices=2", "--", *TRAIN).stdout
    assert "--tpu-type=v6e-8 --num-slices=2 " in answer and "--multihost" in answer
    alone = bash("scripts/launch_tpu_pod.sh", *gke, "--", *TRAIN).stdout
    assert "--num-slices=1 " in alone and "--multihost" not in alone


def test_the_slurm_job_prints_what_it_runs_and_needs_slurm():
    answer = bash("scripts/slurm.sbatch", "--dry-run", *TRAIN[::2])
    words = " ".join(TRAIN[::2]).replace("'", "\\'")
    assert answer.returncode == 0 and answer.stdout.splitlines()[0] == f"sbatch scripts/slurm.sbatch {words}"
    for option in ("--signal=TERM@300", "--requeue", "--cpus-per-task=32", "--mem=0"):
        assert f"  #SBATCH {option}\n" in answer.stdout
    assert f"  XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 srun bash scripts/keep_training.sh {words}\n" in answer.stdout
    alone = bash("scripts/slurm.sbatch", *TRAIN, SLURM_JOB_ID="")
    assert alone.returncode == 2 and "no SLURM job" in alone.stderr


def test_a_slurm_job_stopped_by_a_signal_is_queued_again(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "setup.sh").write_text("set -euo pipefail\n")  # like the real one
    program(tmp_path, "srun", 'echo "$XLA_PYTHON_CLIENT_MEM_FRACTION $JAX_LOCAL_DEVICE_IDS $SRUN_CPUS_PER_TASK $*"; exit $CODE')
    program(tmp_path, "scontrol", 'echo "scontrol $*"')
    def run(code):
        return bash("scripts/slurm.sbatch", "--workdir=w", SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(tmp_path),
                    PATH=f"{tmp_path}:{os.environ['PATH']}", CODE=str(code), SLURM_GPUS_ON_NODE="4",
                    SLURM_CPUS_PER_TASK="12")
    answer = run(75)
    assert answer.returncode == 75
    assert answer.stdout.splitlines() == ["0.92 0,1,2,3 12 bash scripts/keep_training.sh --workdir=w", "scontrol requeue 7"]
    for code in (0, 1):
        assert run(code).returncode == code and "scontrol" not in run(code).stdout


def test_training_continues_through_crashes_and_ends_when_it_should(tmp_path):
    """A stand-in for the training ends with the next of the given codes, and saves from its second start on."""
    python = program(tmp_path, "python3000", f"""
        echo "$@" >> {tmp_path}/starts; n=$(wc -l < {tmp_path}/starts)
        [ "$n" -lt 2 ] || mkdir -p {tmp_path}/run/checkpoints/4
        code=$(cut -d, -f"$n" <<< "$CODES"); [ "$code" -lt 128 ] || kill -$((code - 128)) $$; exit "$code" """)

    def keep(codes, *options):
        for file in (tmp_path / "starts", tmp_path / "run" / "checkpoints" / "4"):
            if file.exists():
                file.unlink() if file.is_file() else file.rmdir()
        result = bash("scripts/keep_training.sh", f"--workdir={tmp_path}/run", "--config=c.py", *options,
                      PYTHON=str(python), CODES=codes, JAXRL_LLM_PAUSE="0")
        return result.returncode, [line.split()[-1] == "--resume" for line in (tmp_path / "starts").read_text().splitlines()]

    assert keep("0") == (0, [False])
    assert keep("137,139,134,0") == (0, [False, False, True, True])  # killed, segmentation fault, abort
    assert keep("1") == (1, [False])
    assert keep("137,75,0") == (75, [False, False])
    assert keep("137,137,137,137", "--restarts=2") == (137, [False, False, True])
    line = bash("scripts/keep_training.sh", "--dry-run", f"--workdir={tmp_path}/run", "--config=c.py", PYTHON="py").stdout
    assert line == f"py experiments/train.py --workdir={tmp_path}/run --config=c.py --resume\n"
    for wrong in (("--config=c.py",), ("--workdir=w", "--resume"), ("--workdir=w", "--restarts=x")):
        assert bash("scripts/keep_training.sh", *wrong).returncode == 2


def test_only_whole_checkpoints_are_resumed_also_below_home(tmp_path):
    def started():
        return bash("scripts/keep_training.sh", "--dry-run", "--workdir=~/run", HOME=str(tmp_path), PYTHON="py").stdout.strip()

    (tmp_path / "run/checkpoints/0.orbax-checkpoint-tmp").mkdir(parents=True)  # of a save that a kill cut short
    assert started() == f"py experiments/train.py --workdir={tmp_path}/run"
    (tmp_path / "run/checkpoints/4").mkdir()
    assert started() == f"py experiments/train.py --workdir={tmp_path}/run --resume"


def test_a_signal_before_a_restart_ends_the_job(tmp_path):
    python = program(tmp_path, "python3000", f"echo start >> {tmp_path}/starts; kill -9 $$")
    kept = subprocess.Popen(["bash", str(ROOT / "scripts/keep_training.sh"), f"--workdir={tmp_path}/run"], text=True,
                            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                            env=os.environ | {"PYTHON": str(python), "JAXRL_LLM_PAUSE": "60"})
    while "again in" not in (line := kept.stderr.readline()):
        assert line, "the script ended before its restart"
    kept.send_signal(signal.SIGTERM)
    assert kept.wait(timeout=30) == 75 and (tmp_path / "starts").read_text() == "start\n"
    kept.stderr.close()


def test_a_folder_that_was_there_is_kept_when_no_environment_can_be_made_in_it(tmp_path):
    """Debian without python3-venv."""
    python = program(tmp_path, "python3000", '[ "$1" = -c ]')
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs/mine.txt").touch()
    for folder, left in (("envs", True), ("new", False)):
        done = bash("scripts/setup.sh", PYTHON=str(python), JAXRL_LLM_VENV=str(tmp_path / folder))
        assert done.returncode == 1 and "apt-get install python3-venv" in done.stderr
        assert (tmp_path / folder).exists() == left
    assert (tmp_path / "envs/mine.txt").exists()


@pytest.mark.parametrize("first", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_reaches_the_training_which_may_take_its_time(tmp_path, first):
    python = program(tmp_path, "python3000", f"""
        trap 'sleep 0.3; echo saved >> {tmp_path}/log; exit 75' TERM
        touch {tmp_path}/ready; while true; do sleep 0.05; done""")
    kept = subprocess.Popen(["bash", str(ROOT / "scripts/keep_training.sh"), f"--workdir={tmp_path}/run"], text=True,
                            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHON": str(python)})
    while not (tmp_path / "ready").exists():
        assert kept.poll() is None
        time.sleep(0.02)
    kept.send_signal(first)
    kept.send_signal(signal.SIGUSR1)
    _, answer = kept.communicate(timeout=30)
    assert kept.returncode == 75 and "the same command continues" in answer
    assert (tmp_path / "log").read_text() == "saved\n"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the script takes the files of a checkout")
def test_a_root_is_unmounted_without_the_devices_of_this_machine(tmp_path):
    """Stand-ins record what is mounted; nothing is mounted before."""
    root = tmp_path / "root"
    (root / "etc/ssl/certs").mkdir(parents=True)
    (root / "made").touch()
    for name in ("mount", "umount", "chroot"):
        program(tmp_path, name, f'echo "{name} $*" >> {tmp_path}/calls')
    for name, body in (("id", "echo 0"), ("debootstrap", "true"), ("mountpoint", "false")):
        program(tmp_path, name, body)
    done = bash("scripts/test_debian.sh", PATH=f"{tmp_path}:{os.environ['PATH']}", JAXRL_LLM_ROOT=str(root))
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    devices = calls.index(f"mount --rbind /dev {root}/dev")
    assert calls[devices + 1] == f"mount --make-rslave {root}/dev" and calls[-1] == f"umount -l {root}"


def test_the_measurements_of_v0_do_not_start_without_the_package_that_keeps_histories(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup.sh").write_text("set -euo pipefail\necho extras $1\n")  # like the real one
    (tmp_path / "scripts/generalist_value.sh").write_text((ROOT / "scripts/generalist_value.sh").read_text())
    program(tmp_path, "python", f'echo "$@" >> {tmp_path}/calls; exit 1')
    done = bash(tmp_path / "scripts/generalist_value.sh", str(tmp_path / "out"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and done.stdout == "extras data\n" and "bash scripts/setup.sh data" in done.stderr
    assert (tmp_path / "calls").read_text() == "-c import tensorflow_datasets\n"
