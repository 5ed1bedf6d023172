"""The work that every peer is timed on, from the environment: B prompts x G rollouts x T new tokens, STEPS steps."""
import os
import random
import re

B, G, T, STEPS, MICRO = (int(os.environ[name]) for name in ("B", "G", "T", "STEPS", "MICRO"))
PROMPT_WORDS, MODEL_DIR = int(os.environ["PROMPT_WORDS"]), os.environ["MODEL_DIR"]


def questions(seed=0):
    """STEPS lists of B (question, answer): those of experiments/benchmark.py."""
    rng = random.Random(seed)
    filler = "Read this first. " + "word " * PROMPT_WORDS if PROMPT_WORDS else ""
    for _ in range(STEPS):
        pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(B)]
        yield [(f"{filler}What is {a} + {b}? Answer with just the number.", str(a + b)) for a, b in pairs]


def score(text, answer):
    """1 if the last whole number of the text is the answer."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == answer)
