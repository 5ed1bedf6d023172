"""Any data set of the reasoning-gym package, with its own scorer (reasoning-gym, arXiv 2505.24760)."""
import json

from jaxrl_llm.tasks.base import Problem, Task, disjoint_task, optional, task
from jaxrl_llm.tools.registry import nearest

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."


@task
def reasoning_gym(*, dataset: str, train_size: int = 1000, heldout_size: int = 200, seed: int = 0, chat: bool = True,
                  config: dict | None = None) -> Task:
    """`train_size + heldout_size` generated problems of one data set, scored by its own `score_answer`.

    Item `i` of a data set is drawn with `seed + i`, so the two sides are two ranges of one seeded data set (data sets
    of neighbouring seeds would share most items); held-out questions that also occur in training are dropped.
    `config` goes to the data set. Raises ValueError for an unknown data set or a configuration that it refuses.
    """
    package = optional("reasoning_gym")
    known = package.factory.DATASETS
    if dataset not in known:
        near = nearest(dataset, known, 5, cutoff=0.3)
        command = "python -c 'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))'"
        raise ValueError(f"Unknown reasoning_gym data set {dataset!r}. Near: {', '.join(near) or 'none'}. "
                         f"`{command}` lists all {len(known)}")
    try:
        scorer = (dataset, json.dumps(config or {}, sort_keys=True))  # the scorer's cache needs a text: options may be lists
        generator = package.create_dataset(dataset, seed=seed, size=train_size + heldout_size, **(config or {}))
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning_gym data set {dataset!r} refused the configuration {config}: {error}") from error
    entries = [generator[i] for i in range(train_size + heldout_size)]
    train = entries[:train_size]
    seen = {entry["question"] for entry in train}
    heldout = [entry for entry in entries[train_size:] if entry["question"] not in seen]

    def build(entry: dict, number: int) -> Problem:
        question = entry["question"].rstrip() + INSTRUCTION
        prompt = ({"role": "user", "content": question},) if chat else question + "\n"
        return Problem(prompt, str(entry["answer"]), number, dataset, {"entry": entry, "gym": scorer})

    return disjoint_task(f"reasoning_gym/{dataset}", train, heldout, build, reward="reasoning_gym")
