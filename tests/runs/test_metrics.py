"""Metrics files are strict JSON, survive kills and resumes, and report errors."""

import json
import math
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.runs.metrics import MetricWriter, host_memory
from jaxrl_llm.store.lines import read_metrics
from jaxrl_llm.tools.timer import PhaseTimer


def tensorboard_scalars(folder):
    """(tag, step, value) of every scalar in the event files, and the steps from which older events are void."""
    from tensorboardX.proto import event_pb2

    scalars, purges = [], []
    for path in sorted(folder.iterdir()):
        data, offset = path.read_bytes(), 0
        while offset < len(data):  # a record: u64 length, u32 crc, bytes, u32 crc
            length = int.from_bytes(data[offset : offset + 8], "little")
            event = event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            if event.session_log.status == event_pb2.SessionLog.START:
                purges.append(event.step)
            offset += length + 16
    return scalars, purges


def test_writing_events_loads_no_pytorch(tmp_path):
    code = ("import sys; from jaxrl_llm.runs.metrics import MetricWriter\n"
            f"with MetricWriter({str(tmp_path)!r}) as writer: writer.write(1, {{'score': 0.5}})\n"
            "assert 'tensorboardX' in sys.modules and 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert tensorboard_scalars(tmp_path / "tensorboard")[0] == [("score", 1, 0.5)]


def test_lines_are_strict_json_and_read_back(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"reward/mean": jnp.float32(0.5), "grad_norm": float("nan"), "n": np.int64(3)})
        writer.write(3, {"reward/mean": 0.1, "high": math.inf, "low": np.float32(-np.inf)})
        lines = [
            json.loads(line, parse_constant=pytest.fail)
            for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        ]
    assert lines == [
        {"step": 1, "reward/mean": 0.5, "grad_norm": "NaN", "n": 3.0},
        {"step": 3, "reward/mean": 0.1, "high": "Infinity", "low": "-Infinity"},
    ]
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == [1, 3] and columns["step"].dtype == np.int64
    np.testing.assert_array_equal(columns["reward/mean"], [0.5, 0.1])
    np.testing.assert_array_equal(columns["grad_norm"], [np.nan, np.nan])
    np.testing.assert_array_equal(columns["high"], [np.nan, np.inf])
    np.testing.assert_array_equal(columns["low"], [np.nan, -np.inf])
    scalars, _ = tensorboard_scalars(tmp_path / "tensorboard")
    assert ("reward/mean", 1, 0.5) in scalars and ("n", 1, 3.0) in scalars
    assert "grad_norm" not in {tag for tag, _, _ in scalars}


def test_each_line_is_on_disk_before_the_next_step(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.write(0, {"a": 1.0})
    assert read_metrics(tmp_path / "metrics.jsonl")["a"].tolist() == [1.0]
    writer.close()


def test_resume_drops_what_will_be_trained_again(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"a": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "a"')  # killed in the middle of a line
    assert read_metrics(tmp_path)["step"].tolist() == [1, 2, 3, 4, 5]
    with MetricWriter(tmp_path, restored_step=3) as writer:
        with pytest.raises(ValueError, match="step=3.*after step 3"):
            writer.write(3, {"a": 0.0})
        writer.write(4, {"a": 40.0})
    columns = read_metrics(tmp_path)
    assert columns["step"].tolist() == [1, 2, 3, 4] and columns["a"].tolist() == [1, 2, 3, 40]
    _, purges = tensorboard_scalars(tmp_path / "tensorboard")
    assert purges[-1] == 4
    with MetricWriter(tmp_path) as writer:  # a fresh start
        writer.write(1, {"b": 1.0})
    assert sorted(read_metrics(tmp_path)) == ["b", "step"]


def test_resume_into_a_folder_without_metrics(tmp_path):
    with MetricWriter(tmp_path / "new", restored_step=7) as writer:
        writer.write(8, {"a": 1.0})
    assert read_metrics(tmp_path / "new")["step"].tolist() == [8]


@pytest.mark.parametrize(
    "step, metrics, message",
    [
        (2, {"a": 1.0}, "one line per step"),
        (1, {"a": 1.0}, "one line per step"),
        (3, {"rewards": jnp.ones(2)}, r"'rewards' is .*\[2\], not a scalar"),
        (3, {"name": "x"}, "'name' is str"),
        (3, {"step": 4.0}, "name 'step' is taken"),
    ],
)
def test_refused_writes_leave_the_file_alone(tmp_path, step, metrics, message):
    with MetricWriter(tmp_path) as writer:
        writer.write(2, {"a": 1.0})
        with pytest.raises(ValueError, match=message):
            writer.write(step, metrics)
        writer.write(4, {"a": 2.0})
    assert read_metrics(tmp_path)["step"].tolist() == [2, 4]


def test_full_disk_is_named(tmp_path):
    try:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        open("/dev/full").close()
    except OSError:
        pytest.skip("no /dev/full on this system")
    writer = MetricWriter(tmp_path)
    with pytest.raises(OSError, match="cannot append step 1 to .*No space left"):
        writer.write(1, {"a": 1.0})


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no metrics file"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\nnoise\n{"step": 2, "a": 1.0}\n')
    with pytest.raises(ValueError, match="line 2 is no JSON object with a step: 'noise"):
        read_metrics(tmp_path)


def test_phase_times_add_up_to_the_wall_clock():
    timer = PhaseTimer()
    before = time.perf_counter()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(KeyError), timer("reward"):
        raise KeyError
    with timer("update"):
        with pytest.raises(ValueError, match="'eval' begins inside 'update'"), timer("eval"):
            pass
    times = timer.collect()
    assert set(times) == {"time/rollout", "time/reward", "time/update", "time/other"}
    assert times["time/rollout"] >= 0.04 and min(times.values()) >= 0
    assert sum(times.values()) <= time.perf_counter() - before + 1e-3
    assert set(timer.collect()) == {"time/other"}


def test_host_memory_is_in_gigabytes_and_sees_an_allocation():
    before = host_memory()["host/rss_gb"]
    block = np.ones(25_000_000)  # 0.2 GB
    assert 0.15 < host_memory()["host/rss_gb"] - before < 0.3
    assert before > 0.01 and block[-1] == 1
