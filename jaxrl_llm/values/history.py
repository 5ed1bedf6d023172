"""Recorded histories (policy, step, prompt, outcome), on which V0 is trained and measured; stored as ArrayRecord by TFDS."""
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.tasks.base import optional
from jaxrl_llm.values.v0_training import Episode, pairs

NAME, VERSION = "policy_history", "1.0.0"


@dataclasses.dataclass(frozen=True)
class History:
    """R results: row r says that `policy[r]` at `step[r]` solved the share `outcome[r]` of its tries on `prompt[r]`.

    policies: names, [M].  prompts: texts, [U].  policy, step, prompt i32[R], outcome f32[R] in [0, 1]; policy and prompt are
    positions in the two lists.
    """

    policies: Sequence[str]
    prompts: Sequence[str]
    policy: np.ndarray
    step: np.ndarray
    prompt: np.ndarray
    outcome: np.ndarray

    @property
    def snapshot(self) -> np.ndarray:
        """i32[R]: equal for rows of the same policy at the same step; contexts never mix them."""
        return np.unique(np.stack([self.policy, self.step]), axis=1, return_inverse=True)[1].reshape(-1)


def of_rows(rows: Sequence[tuple[str, int, str, float]]) -> History:
    """From (policy, step, prompt, outcome) rows. Rows that agree in the first three are merged, with the mean outcome.

    Raises ValueError without rows, and for an outcome outside [0, 1].
    """
    groups: dict[tuple[str, int, str], list[float]] = {}
    for policy, step, prompt, outcome in rows:
        if not 0 <= outcome <= 1:
            raise ValueError(f"outcome {outcome} of policy {policy!r} at step {step} is not between 0 and 1; record the share "
                             "of right answers")
        groups.setdefault((policy, int(step), prompt), []).append(float(outcome))
    if not groups:
        raise ValueError("no rows to make a history of")
    policies, prompts = sorted({policy for policy, _, _ in groups}), sorted({prompt for _, _, prompt in groups})
    place = [{name: i for i, name in enumerate(names)} for names in (policies, prompts)]
    columns = np.array([(place[0][policy], step, place[1][prompt]) for policy, step, prompt in groups], np.int32).T
    outcomes = np.array([np.mean(x) for x in groups.values()], np.float32)
    return History(policies, prompts, columns[0], columns[1], columns[2], outcomes)


def select(history: History, rows: np.ndarray) -> History:
    """The rows where `rows` bool[R] holds; the lists of policies and prompts stay."""
    return dataclasses.replace(history, **{name: getattr(history, name)[rows]
                                           for name in ("policy", "step", "prompt", "outcome")})


def save(history: History, directory: str | Path) -> Path:
    """Writes ArrayRecord files through a TFDS builder into `directory`; returns the folder that `load` reads.

    Raises FileExistsError if there already is a history, ValueError without the package of extra `data`.
    """
    tfds = optional("tensorflow_datasets", "data", "history")
    folder = Path(directory).absolute() / NAME / VERSION
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a history is written once: choose another directory")
    columns = zip(history.policy, history.step, history.prompt, history.outcome)
    rows = [{"policy": history.policies[m], "step": step, "prompt": history.prompts[u], "outcome": outcome}
            for m, step, u, outcome in columns]

    class PolicyHistory(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg, name-defined]
        """Shares of right answers of policies at training steps on prompts."""

        VERSION = tfds.core.Version(VERSION)
        code_path = Path(__file__)  # TFDS finds it alone only with a package that it forgets to require

        def _info(self):
            f = tfds.features
            features = f.FeaturesDict({"policy": f.Text(), "step": f.Scalar(np.int32), "prompt": f.Text(),
                                       "outcome": f.Scalar(np.float32)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate(rows)

    tfds.disable_progress_bar()
    PolicyHistory(data_dir=str(Path(directory).absolute()), file_format="array_record").download_and_prepare()
    return folder


def load(folder: str | Path) -> History:
    """The history in a folder that `save` returned; ValueError if there is none."""
    tfds = optional("tensorflow_datasets", "data", "history")
    if not (Path(folder) / "dataset_info.json").is_file():
        raise ValueError(f"{folder} holds no history; give the folder that experiments/record_history.py printed")
    def text(x):
        return x.decode("utf-8") if isinstance(x, bytes) else str(x)
    source = tfds.builder_from_directory(str(Path(folder).absolute())).as_data_source("train")
    return of_rows([(text(r["policy"]), int(r["step"]), text(r["prompt"]), float(r["outcome"])) for r in source])


def episodes(history: History, rng: np.random.Generator, *, context: int, queries: int, shared: np.ndarray | None = None
             ) -> Iterator[Episode]:
    """Endless contexts and queries, each of one policy at one step, chosen with equal probability.

    A snapshot is skipped unless its context holds both classes (outcomes from 0.5 on, below) and there is a query.
    Contexts shorter than `context` are padded; queries are drawn again where there are fewer than `queries`, never from
    the context. With `shared` (bool[U]) contexts come from these prompts and queries from the others.
    """
    snapshot = history.snapshot
    members = [np.flatnonzero(snapshot == s) for s in range(snapshot.max() + 1)]
    misses = 0
    while True:
        rows = rng.permutation(members[rng.integers(len(members))])
        if shared is None:
            size = min(context, len(rows) - min(queries, len(rows) // 2))
            known, asked = rows[:size], rows[size:]
        else:
            inside = shared[history.prompt[rows]]
            known, asked = rows[inside][:context], rows[~inside]
        right = history.outcome[known] >= 0.5
        if not len(asked) or right.all() or not right.any():
            misses += 1
            if misses > 100 * len(members):
                raise ValueError("no policy at any step has both right and wrong answers in its context and a query left; "
                                 "record more prompts per step")
            continue
        misses = 0
        asked = np.resize(asked, queries)
        def fill(x, dtype):
            return np.pad(x, (0, context - len(x))).astype(dtype)
        labels = history.outcome[asked]
        yield Episode(fill(history.prompt[known], np.int32), fill(history.outcome[known], np.float32),
                      np.arange(context) < len(known), history.prompt[asked].astype(np.int32), labels,
                      *pairs(labels, queries))


def held_out(history: History, rng: np.random.Generator, *, policies: float = 0.25, prompts: float = 0.25
             ) -> tuple[np.ndarray, np.ndarray]:
    """(bool[M], bool[U]): the policies and prompts to hold out from training, at least one of each."""
    def chosen(size, share):
        picked = np.zeros(size, bool)
        picked[rng.permutation(size)[:min(max(round(share * size), 1), size - 1)]] = True
        return picked

    return chosen(len(history.policies), policies), chosen(len(history.prompts), prompts)
