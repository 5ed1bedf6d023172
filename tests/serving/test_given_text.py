"""Text that the policy did not write, or wrote under another text: the same acts are the same forest in every engine."""
import re

import chatter
import jax
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.engines.prompts import encode_problem
from jaxrl_llm.environments import Environment, Turn
from jaxrl_llm.learning.snapshot import Snapshot
from jaxrl_llm.setup import setup, sources
from jaxrl_llm.setup.judge import make_judge
from jaxrl_llm.tasks import make as make_task
from jaxrl_llm.tokenizers.byte import ByteTokenizer
from jaxrl_llm.topologies import Begin, BeginPart

pytestmark = pytest.mark.usefixtures("short_waits")
LETTER, TASK, G, READS = "(?s).*[a-z].*", {"level": "digit"}, 4, [257, *b"A longer prompt: 3+4="]


def scripted() -> Environment:
    """The sums of the task in an environment of one turn, which is rewarded for lower-case letters too."""
    def reset(problem, key):
        return {}, [{"role": "user", "content": "", "ids": encode_problem(problem, ByteTokenizer())}]

    def step(state, message):
        return Turn(reward=float(re.fullmatch(LETTER, message["content"]) is not None), done=True)

    return Environment(name="scripted", task=make_task("arithmetic", **TASK), reset=reset, step=step, tokens=True,
                       replayable=False)


def stream_of(**changes):
    """`(stream, forest of two prompts)` of a run with these changes."""
    config = chatter.get_config(**{"environment": "", "task": "arithmetic(level=digit)", "sampling.turn_tokens": 8,
                                   "rewards": f"format(pattern='{LETTER}')", "sampling.max_tokens": 8, **changes})
    config, policy, source, params = setup.build_policy(config)
    source = sources.make_plain_source(config, policy, policy.mesh, source.stream.tokenizer, make_judge(config),
                                       reads=len(READS))
    some = [source.task.train[i] for i in range(2)]
    source.stream.publish(Snapshot(3, params, None, jax.random.key(0)))
    return source, source.planted(list(zip(some, source.stream.partner.encode(some, source.stream.tokenizer))), 0)


def acts(**sampling):
    """A prefix in three roles, a text that is all of it, and what is written under another text, alone and after a part."""
    parts = BeginPart(Role.POLICY, [50, 51], [-1.5, -2.5]), BeginPart(Role.HINT, "7"), BeginPart(Role.EXPERT, "ab")
    moved = BeginPart(Role.ELSEWHERE, "mn", [-3.5, -4.5])
    return [Begin(0, 1, parts, sampling=sampling), Begin(0, 1, parts[1:], ends=True),
            Begin(0, 1, (moved,), reads=READS, ends=True), Begin(1, 2, reads=READS, sampling=sampling),
            Begin(1, 1, parts[2:], 5, sampling, reads=READS)]


def grown(source, forest):
    stream = source.stream
    free = stream.run(forest, acts(), 0) if stream.kind.name != "server" else None
    return free, stream.run(forest, acts(temperature=0.0), 100)


def assert_alike(one, other):
    for name in ("uid", "parent", "prompt", "role", "length", "tokens", "version", "rewards"):
        np.testing.assert_array_equal(one.columns[name], other.columns[name], err_msg=name)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert one.reads.tolist() == other.reads.tolist()


@pytest.mark.slow
def test_every_engine_grows_the_same_forest(url, folder):
    """In the scan sampler, in slots, in an environment, and by a server, whose draws are compared at temperature 0."""
    scan, slots, played, served = (grown(*stream_of(**changes)) for changes in (
        {"sampling.engine": "scan"}, {"sampling.engine": "slots"},
        {"environment": "test_given_text:scripted", "sampling.max_turns": 1, "rewards": "", "task": ""},
        {"server.url": url, "server.weights": str(folder)}))
    for pair in (slots, played):
        assert_alike(scan[0], pair[0])
        assert_alike(scan[1], pair[1])
    assert_alike(scan[1], served[1])
    assert scan[0].tokens.tolist() != scan[1].tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("changes", (
    {"sampling.engine": "scan", "sampling.micro_batches": 2}, {"sampling.engine": "slots", "sampling.paged_cache": True},
    {"sampling.engine": "slots", "sampling.micro_batches": 2},
    {"environment": "test_given_text:scripted", "sampling.max_turns": 1, "rewards": "", "task": ""}), ids=str)
def test_rounds_and_parts_of_a_batch_grow_the_same_forest(changes):
    """The acts of one plan, and of two as in rounds, with limits of their own as budgets have."""
    source, forest = stream_of(**{"sampling.engine": "scan"})
    whole = source.stream.run(forest, acts(), 0)
    source, forest = stream_of(**changes)
    half = source.stream.run(forest, acts()[:3], 0)
    assert_alike(whole, source.stream.run(half, acts()[3:], 4))


def test_what_is_written_under_another_text_lies_under_the_prompt():
    """Roles, log-probs of the writer, what it read; a text that is all of it costs no draw, and ends by itself."""
    source, forest = stream_of(**{"sampling.engine": "scan"})
    whole = grown(source, forest)[1]
    ends = [[(Role(int(whole.role[i])), whole.length[i], whole.reads[i]) for i in np.flatnonzero(whole.uid == uid)]
            for uid in (100, 101, 102, 104, 106)]
    P, H, E, W = Role.POLICY, Role.HINT, Role.EXPERT, Role.ELSEWHERE
    assert [[role for role, *_ in nodes] for nodes in ends] == [[P, H, E, P], [H, E], [W], [W], [E, W]]
    assert ends[1] == [(H, 1, None), (E, 2, None)] and ends[2] == [(W, 2, READS)] and ends[4][0] == (E, 2, None)
    assert ends[4][1][1] <= 3 and ends[4][1][2] == READS
    assert whole.stopped[whole.ends][1:3].all() and whole.aided.all()
    rollouts = source.view(whole, 3)
    np.testing.assert_array_equal(rollouts.mask[0, 1, :4], [False, True, True, False])
    np.testing.assert_array_equal(rollouts.behavior_logprobs[0, 2, :2], [-3.5, -4.5])
    np.testing.assert_array_equal(rollouts.behavior_logprobs[0, 0, :2], [-1.5, -2.5])
    assert np.isnan(rollouts.behavior_logprobs[0, 0, 3:5]).all() and rollouts.mask[0, 0, 3:5].all()
    one = source.stream.run(source.planted([(forest.problems[0], READS)], 0), [Begin(0, 1, sampling={"temperature": 0.0})], 104)
    first = whole.uid == 104
    assert whole.tokens[np.repeat(first, whole.length)].tolist() == one.tokens[np.repeat(one.uid == 104, one.length)].tolist()


@pytest.mark.parametrize(("act", "said"), (
    (lambda: Begin(0, ends=True), "ends=True without parts; give the parts that are all of it, or leave ends out"),
    (lambda: Begin(0, parts=(BeginPart(Role.ELSEWHERE, [5]),)), "a part has the role ELSEWHERE, and reads are empty"),
    (lambda: Begin(0, by="teacher"), "Unknown writer of the rest 'teacher'. Allowed: policy"),
    (lambda: Begin(make_task("arithmetic", **TASK).train[3]), "the problem has the id 3, which is that of a problem of")))
def test_acts_that_cannot_be_are_refused(act, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        act()


def test_a_text_longer_than_engines_are_made_for_is_refused():
    source, forest = stream_of(**{"sampling.engine": "scan"})
    with pytest.raises(ValueError, match=re.escape("trajectory 0 reads 23 tokens in place of its prompt, and engines are made "
                                                   "for 22; write Topology(..., reads=23)")):
        source.stream.apply(forest, [Begin(0, reads=[*READS, 65])], 0)
