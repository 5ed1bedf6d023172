"""Groups behind parts of traces: which ones, the worked example, traces of files and of earlier runs, and refusals."""
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from played import play

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Role, from_lists
from jaxrl_llm.engines.prompts import spelled
from jaxrl_llm.runs.samples import write_samples
from jaxrl_llm.sampling.trajectory import beginning
from jaxrl_llm.tasks.base import Problem, Task
from jaxrl_llm.tasks.found_traces import found_traces
from jaxrl_llm.tasks.traces import Trace
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.topologies import FromTrace, single
from jaxrl_llm.topologies.base import remember
from jaxrl_llm.topologies.prefix_rl import cut_of, prefix_rl

HARD = [Problem(f"{n}+4=", str(n + 4), n, extra={"solution": f"Count on from {n}: it is {n + 4}"}) for n in range(3, 7)]
TASK = Task("sums", HARD, HARD[:1], "exact")


def begun(plan):
    """What each act begins at and with: the id of its problem, and the part of a trace."""
    return [(act.at if isinstance(act.at, int) else act.at.id, [tuple(part) for part in act.parts]) for act in plan.acts]


def test_a_share_of_the_groups_begins_behind_parts_of_traces():
    """Each part is one of three of its problem, 40% to 80% of its solution and no more than what comes before the answer."""
    topology, seen = prefix_rl(single(4, group=2), task=TASK), set()
    for _ in range(60):
        plans, forest = play(topology, HARD, lambda problem, act, number: float(problem.id < 0 and number == 0))
        assert [act.count for act in plans[1].acts] == [2] * 4
        for at, parts in begun(plans[1]):
            if at < 0:
                (role, (number, share), logprobs, *_), = parts
                problem = HARD[(-1 - at) // 3 - 3]
                assert role == Role.HINT and number == 0 and logprobs is None
                assert 0.4 <= share <= min(0.8, problem.extra["solution"].rfind(problem.answer) / 21 + 1e-9)
                seen.add((at, share))
            else:
                assert not parts
        cut = [problem.id < 0 for problem in forest.problems]
        there = np.bincount(forest.prompt[forest.ends], minlength=len(cut)) > 0
        assert topology.choose(forest).tolist() == there.tolist() and there.sum() == 4 and there[4:].all()
        if any(cut) and not all(np.array(cut)[there]):
            told = topology.metrics(forest)
            assert told == {"prefix/share": sum(cut) / 4, "prefix/reward": 0.5, "prefix/unaided": 0, "prefix/answer": 0}
    assert len(seen) == 12 and topology.memory == {"groups": 240}


def test_three_of_four_groups_begin_behind_a_part_and_a_resumed_run_goes_on():
    topology = prefix_rl(single(4, group=1), task=TASK)
    cut = np.mean([at < 0 for _ in range(200) for at, _ in begun(play(topology, HARD, lambda *_: 0.0)[0][1])])
    assert abs(cut - 0.75) < 0.05
    other = prefix_rl(single(4, group=1), task=TASK)
    remember(other, topology.memory)
    following = [begun(play(one, HARD, lambda *_: 0.0)[0][1]) for one in (topology, other)]
    assert following[0] == following[1]
    alone = prefix_rl(single(4, group=1), task=TASK, share=1.0)
    assert all(at < 0 for at, _ in begun(play(alone, HARD, lambda *_: 0.0)[0][1]))


def test_the_worked_example():
    """35% of ten tokens are three; two groups of two, and of one token that is trained: the group behind the part learns."""
    trace = spelled(Trace("abcdefghij"), Problem("?", "", 0), ByteTokenizer())
    assert [part.ids for part in beginning(trace, 0.35, 99, Role.HINT)] == [[97, 98, 99]]
    batch = from_lists([[0, 0], [1, 0]])
    values, _ = advantages.make("dr_grpo").update(batch, ())
    np.testing.assert_array_equal(values[..., 0], [[0, 0], [0.5, -0.5]])
    new = jnp.log(jnp.full((2, 2, 1), 0.3))
    gradient = jax.grad(lambda x: objectives.make("reinforce").update(x, batch, values, ())[0])(new)
    np.testing.assert_allclose(gradient[..., 0], [[0, 0], [-0.125, 0.125]], atol=1e-7)


def test_parts_end_before_the_answer_and_wrong_traces_are_left_out():
    early = Problem("?", "9", 1, extra={"traces": [{"text": "no", "correct": False}, {"text": "is 9, of course"}]})
    number, share = cut_of(early, 0, 0.4, 0.8)
    assert number == 1 and share == pytest.approx(3 / 15)
    assert cut_of(Problem("?", "9", 1, extra={"solution": "9"}), 0, 0.4, 0.8) is None
    free = Problem("?", "", 1, extra={"solution": "abc"})
    assert [cut_of(free, which, 0.5, 0.5) for which in (0, 1)] == [FromTrace(0, 0.5)] * 2


# --- traces of files ----------------------------------------------------------------------------------------------------

PLAIN = Task("sums", [Problem("3+4=", "7", 0), Problem(({"role": "user", "content": "13+4="},), "17", 1),
                      Problem("5+5=", "10", 2)], [], "exact")


def test_the_right_samples_of_an_earlier_run_are_traces(tmp_path):
    write_samples(tmp_path, 3, ["<s>3+4=", "user: 13+4=\n"], ["7", "17"], [["it is 7", "8"], ["17", "17"]], [[1, 0], [1, 1]],
                  [[{}, {}]] * 2, [[3, 1]] * 2, [["stop"] * 2] * 2,
                  [[{"solved": True}, {"solved": False}], [{"solved": True}, {"solved": True}]])
    found = found_traces(str(tmp_path), PLAIN)
    assert found == {0: [{"text": "it is 7", "correct": True}], 1: [{"text": "17", "correct": True}]}
    topology = prefix_rl(single(3, group=2), task=PLAIN, traces=str(tmp_path), share=1.0)
    plans, _ = play(topology, PLAIN.train, lambda *_: 0.0)
    made, answered, bare = (act.at for act in plans[1].acts)
    assert made.extra["traces"] == found[0] and made.id < 0 and answered.extra["traces"] == found[1] and bare == 2


def test_a_file_of_traces_names_prompts(tmp_path):
    lines = [{"prompt": "5+5=", "completion": "ten, 10"}, {"prompt": "5+5=", "response": "11", "correct": False},
             {"prompt": "13+4=", "messages": [{"role": "assistant", "content": "17!"}, {"role": "user", "content": "Good."}]}]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = found_traces(str(tmp_path / "traces.jsonl"), PLAIN)
    assert {number: [one["text"] for one in some] for number, some in found.items()} == {2: ["ten, 10"], 1: ["17!"]}


@pytest.mark.parametrize(("line", "said"), [
    ({"prompt": "1+1=", "completion": "2", "answer": "2"}, "none of 1 lines is a right trace of a training problem"),
    ({"prompt": "5+5="}, "traces.jsonl, line 1: 'completion' is 'None'; give each trace a 'prompt' and a 'completion'"),
    ({"completion": "5+5="}, "line 1: 'prompt' is 'None'")])
def test_files_without_traces_of_the_task_are_refused(tmp_path, line, said):
    (tmp_path / "traces.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=said):
        prefix_rl(single(3, group=2), task=PLAIN, traces=str(tmp_path / "traces.jsonl"))


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="low=0.9 and high=0.8; give 0 <= low <= high < 1"):
        prefix_rl(single(1, group=2), task=TASK, low=0.9)
    with pytest.raises(ValueError, match="those of task 'sums' have none; give the data a column of traces or solutions, or"):
        prefix_rl(single(1, group=2), task=Task("sums", [Problem("Play.", "", 0)], [], "exact"))
    with pytest.raises(ValueError, match="is no file, and no folder of a run with samples"):
        prefix_rl(single(1, group=2), task=TASK, traces=str(tmp_path))
