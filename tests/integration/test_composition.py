"""Methods and settings go together: every cell of a table is built, and every pair of its names learns from a batch once."""
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import job
import pytest
from composition_cases import MESHED, METHODS, SETTINGS, answer

CASES = Path(job.__file__).with_name("composition_cases.py")
MESH = ("fsdp", "tensor")
MOST = 6  # settings of a run at once

# Pairs of names that a run cannot have, and why.
APART = {
    ("environment", "mixture"): "a mixture is one of tasks, and an environment has a task of its own",
}
CELLS = [(method, *others) for method in METHODS for others in (
    *((name,) for name in SETTINGS), ("slots", *MESH), ("environment", *MESH), *APART)]


def apart(names) -> bool:
    """Whether two of the names are refused."""
    return any({*pair} <= {*names} for pair in APART)


def pairs_of(names) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in itertools.combinations(names, 2)}


@functools.cache
def covering() -> list[tuple[str, ...]]:
    """A few runs, a method and its settings each, that have every pair of names which go together."""
    method_pairs = itertools.product(METHODS, SETTINGS)
    left = {frozenset(pair) for pair in (*method_pairs, *itertools.combinations(SETTINGS, 2)) if not apart(pair)}
    runs = []
    while left:
        def best(start, names):
            able = [name for name in names if not apart((*start, name))]
            return max(able, key=lambda name: len(pairs_of((*start, name)) & left), default=None)

        run = (max(METHODS, key=lambda method: sum(method in pair for pair in left)),)
        while len(run) <= MOST and (name := best(run, [one for one in SETTINGS if one not in run])):
            if not pairs_of((*run, name)) & left - pairs_of(run):
                break
            run = (*run, name)
        assert pairs_of(run) & left, "a pair is left that no run has"
        left -= pairs_of(run)
        runs.append(run)
    return runs


def answers(processes: int, questions: list[tuple[bool, tuple[str, ...]]], folder: Path) -> list[list[str | None]]:
    """What each process answers to `(only build, names)`; eight devices in all."""
    (folder / "questions").write_text("\n".join(map(json.dumps, questions)))
    start = [sys.executable, str(CASES), str(folder / "questions")]
    joining = [[]] if processes == 1 else [[str(port), str(n)] for port in [job.free_port()] for n in range(processes)]
    files = [(folder / str(number)).open("w+") for number in range(processes)]
    started = [subprocess.Popen([*start, *more], cwd=job.ROOT, env=job.with_devices(8 // processes), stdout=file,
                                stderr=subprocess.STDOUT) for more, file in zip(joining, files)]
    codes = job.finish(started, 600)
    for file in files:
        file.seek(0)
    texts = [file.read() for file in files]
    assert codes == [0] * processes, "\n".join(text[-3000:] for text in texts)
    return [[json.loads(line[7:]) for line in text.splitlines() if line.startswith("answer ")] for text in texts]


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """What is wrong with each cell that is built, and each run that is stepped; None: nothing."""
    questions = [*((True, cell) for cell in CELLS), *((False, run) for run in covering())]
    jobs = {number: [] for number in (0, 1, 2)}  # in this process, in one of eight devices, in two of four
    for only, names in questions:
        jobs[2 if "processes" in names else int(bool(MESHED & {*names}))].append((only, names))
    known = {(only, names): answer(only, *names) for only, names in jobs[0]}
    for processes in (1, 2):
        several = answers(processes, jobs[processes], tmp_path_factory.mktemp("composition"))
        assert len({json.dumps(one) for one in several}) == 1, several
        known |= dict(zip(jobs[processes], several[0], strict=True))
    return known


def test_few_runs_have_every_pair_of_names():
    runs = covering()
    wanted = {frozenset(pair) for pair in (*itertools.product(METHODS, SETTINGS), *itertools.combinations(SETTINGS, 2))}
    assert set().union(*map(pairs_of, runs)) == wanted - {frozenset(pair) for pair in APART} and len(runs) <= 40


@pytest.mark.slow
def test_every_cell_is_built_or_is_refused_for_a_reason(answered):
    refused = {names: answered[True, names] for names in CELLS if answered[True, names] is not None}
    assert {*refused} == {names for names in CELLS if apart(names)}, refused


@pytest.mark.slow
def test_every_pair_learns_from_a_batch(answered):
    wrong = {names: answered[False, names] for names in covering() if answered[False, names] is not None}
    assert not wrong, wrong
