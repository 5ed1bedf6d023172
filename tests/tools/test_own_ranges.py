"""A part says the ranges of its own numbers, for values, schedules and texts alike."""
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.methods import texts
from jaxrl_llm.objectives.base import OBJECTIVES, objective
from jaxrl_llm.tools.ranges import POSITIVE, SHARE, Range
from jaxrl_llm.topologies import TOPOLOGIES, single, topology
from jaxrl_llm.topologies.rules import RULES, Rule, rule


@pytest.fixture
def parts():
    @objective(ranges={"heat": POSITIVE, "beta": Range(-1, 1)})
    def warmed(*, heat: float = 1.0, beta: float = 0.5, gate: float | None = None, clip_low: float = 0.2):
        return objectives.make("reinforce")

    @rule(ranges={"part": SHARE})
    def shared(*, part: float = 0.5, other: float = 2.0):
        return Rule(lambda rewards, valid, first, most: valid.sum(1) * 0)

    @topology(ranges={"part": SHARE})
    def cut(prompts: int, part: float = 0.5, rounds: int = 1):
        return single(prompts=prompts, group=2)

    yield
    del OBJECTIVES["warmed"], RULES["shared"], TOPOLOGIES["cut"]


@pytest.mark.parametrize("text, said", [
    ("warmed(heat=0)", "objective 'warmed': heat=0; give more than 0, finite"),
    ("warmed(heat=inf)", "objective 'warmed': heat=inf; give more than 0, finite"),
    ("warmed(heat=linear(start=1, end=-2))", "objective 'warmed': heat=-2; give more than 0, finite"),
    ("warmed(heat=hot)", "objective 'warmed': heat='hot'; give a number, for example 1.0"),
    ("warmed(beta=1.5) + kl(0.1)", "in warmed(beta=1.5): objective 'warmed': beta=1.5; give -1 or more and at most 1"),
    ("warmed(clip_low=-1)", "objective 'warmed': clip_low=-1; give 0 or more")])
def test_numbers_outside_are_refused_with_the_range(parts, text, said):
    """The part's own range of `beta` stands before the one that objectives share, above 0."""
    assert [line for line in texts.faults("objective", text) if said in line]


def test_numbers_inside_pass(parts):
    for text in ("warmed(heat=1e-9, beta=-1)", "warmed(heat=linear(start=1, end=2))", "warmed(gate=none)"):
        assert texts.faults("objective", text) == []
    assert RULES.make("shared", part=1, other=-5) is not None
    with pytest.raises(ValueError, match="allocation rule 'shared': part=1.1; give 0 or more and at most 1"):
        RULES.make("shared", part=1.1)


def test_numbers_of_topologies_are_checked_too(parts):
    """Runs make topologies with arguments of their own, so texts are checked before."""
    assert texts.faults("topology", "cut(part=7, rounds=1.5)") == [
        "topology 'cut': part=7; give 0 or more and at most 1; topology 'cut': rounds=1.5; give a whole number"]
    assert texts.faults("topology", "cut(rounds=two)") == ["topology 'cut': rounds='two'; give a number, for example 1"]
    assert texts.faults("topology", "cut(part=1, rounds=3)") == []


def test_a_range_of_a_number_that_is_not_there_is_an_error():
    with pytest.raises(TypeError, match="objective 'cold' has no number het, of which it gives the range"):
        @objective(ranges={"het": POSITIVE})
        def cold(*, heat: float = 1.0):
            return objectives.make("reinforce")
    assert "cold" not in OBJECTIVES


def test_a_fraction_in_the_place_of_a_whole_number_is_refused():
    """Also for a number that may be None, one that is annotated by text, and infinity; 2e1 is a whole number."""
    for text, said in (("grpo(ddof=1.5)", "estimator 'grpo': ddof=1.5; give a whole number"),
                       ("mssr(num_prompts=inf)", "estimator 'mssr': num_prompts=inf; give a whole number")):
        assert texts.faults("estimator", text) == [said]
    assert texts.faults("objective", "ppo_clip(max_len=1.5)") == ["objective 'ppo_clip': max_len=1.5; give a whole number"]
    assert texts.faults("objective", "ppo_clip(max_len=2e1)") == texts.faults("estimator", "grpo(eps=1.5)") == []


def test_a_whole_number_may_be_written_with_a_point():
    """Its factory gets an `int`, with which arrays have their shapes."""
    assert advantages.make("mssr", num_prompts=2e1).init() is not None
