"""Environments of the tinker cookbook for the tests, with the tokens of the byte tokenizer: say a letter, twice."""
import asyncio

import chz
import tinker
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

from jaxrl_llm.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
CLEANED: list[str] = []


class Letter(Env):
    """Two turns; a message with the letter earns a half. The messages "hang", "rewrite" and "image" trigger these faults."""

    def __init__(self, letter):
        self.letter, self.ids, self.turn = letter, [], 0

    async def initial_observation(self):
        self.ids = BYTES.encode(f"Say {self.letter}.\n")
        return tinker.ModelInput.from_ints(self.ids), [BYTES.eos_id]

    async def step(self, action, *, extra=None):
        text = BYTES.decode(list(action))
        if text == "hang":
            await asyncio.sleep(60)
        self.turn += 1
        good = self.letter in text
        self.ids = [*self.ids, *action, *BYTES.encode("Good.\n" if good else "No.\n")]
        seen = self.ids[1:] if text == "rewrite" else self.ids
        chunks = tinker.ModelInput.from_ints(seen)
        if text == "image":
            image = tinker.types.ImageChunk(data=b"", format="png", expected_tokens=1)
            chunks = tinker.ModelInput(chunks=[*chunks.chunks, image])
        return StepResult(0.5 * good, self.turn == 2, chunks, [BYTES.eos_id], metrics={"good": float(good)})


class Builder(EnvGroupBuilder):
    def __init__(self, letter):
        self.letter = letter

    async def make_envs(self):
        return [Letter(self.letter) for _ in range(4)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        return [(0.25 * len(trajectory.transitions), {}) for trajectory in trajectory_group]

    async def cleanup(self):
        CLEANED.append(self.letter)


class Letters(RLDataset):
    def __init__(self, letters):
        self.letters = letters

    def get_batch(self, index):
        return [Builder(letter) for letter in self.letters[4 * index:4 * index + 4]]

    def __len__(self):
        return -(-len(self.letters) // 4)


@chz.chz
class LettersBuilder(RLDatasetBuilder):
    test: bool = True

    async def __call__(self):
        return Letters("abcdefghij"), Letters("xyz") if self.test else None


def builder(test=True):
    return LettersBuilder(test=test)


def nothing():
    return None
