"""Reward functions that misbehave on demand, imported by worker processes in the tests."""

import os
import sys
import time

import numpy as np


def fault(completion, answer, problem):
    """The completion names the fault."""
    if completion == "sleep":
        time.sleep(600)
    if completion == "power":  # holds the interpreter lock: no thread or Python signal handler could stop it
        return 3 ** (10 ** 9)
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise KeyError("on purpose")
    if completion == "text":
        return "one"
    if completion == "memory":
        return len(bytearray(8 << 30))
    if completion == "print":
        print("noise on stdout", file=sys.stdout, flush=True)
        os.write(1, b'{"value": 99}\n')
        return 0.5
    if completion == "numpy":
        return np.float32(0.25)
    if completion == "none":
        return None
    if completion == "pid":
        return os.getpid()
    return float(completion == answer)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl calls it; its answer is a dictionary."""
    right = solution_str == ground_truth and data_source == "openai/gsm8k" and extra_info == {"index": 7}
    return {"score": float(right), "acc": right}


def open_ended(solution_str, ground_truth, **others):
    return 0.5 * (solution_str == ground_truth) + 0.5 * (sorted(others) == ["data_source", "extra_info"])
