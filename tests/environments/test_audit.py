"""The audit passes the shipped environments, and detects every fault that it checks."""
import pytest

from jaxrl_llm import environments
from jaxrl_llm.environments import Environment, Turn, audit
from jaxrl_llm.tasks import make


@pytest.mark.parametrize("name", ["single", "tool_use", "guess_number", "treasure"])
def test_shipped_environments_pass(name, capsys):
    assert audit.main([name, "--trajectories=12", "--seed=1"]) == 0
    printed = capsys.readouterr().out
    assert all(policy in printed for policy in audit.POLICIES) and "FAILS" not in printed and printed.count("holds") == 7


def test_every_planted_fault_is_detected(capsys):
    assert audit.main(["faulty_environments:leaky", "--trajectories=4"]) == 1
    printed = capsys.readouterr().out
    for check in ("trajectories end", "returns in range", "repeats itself", "answer not shown", "attacks earn nothing",
                  "oracle wins"):
        assert f"FAILS  {check}" in printed, check
    assert "it is in 100% of what is to be read, another problem's in 0%" in printed and "depends on the key" in printed
    assert "holds  raises nothing" in printed


def test_exceptions_and_forgotten_states_are_detected():
    def environment():
        task = make("arithmetic", chat=True)
        def step(state, message):
            if "tool" in message["content"]:
                raise LookupError("parser")
            return Turn(done=True, reward=float(id(state) % 7) if "0 1 2" in message["content"] else 0.0)
        return Environment(name="x", task=task, returns=(0.0, 7.0), step=step,
                           reset=lambda problem, key: ({}, [{"role": "user", "content": "?"}]))
    rows, checks = audit.audit(environment(), environment(), 40, 0)
    assert "LookupError: parser" in checks["raises nothing"] and checks["trajectories end"] == ""
    assert [row["policy"] for row in rows] == ["null", "random", "injection"] and rows[2]["raised"] > 0
    assert "oracle wins" not in checks


def test_chance_is_no_leak():
    """Answers of one digit often appear by chance: as often as those of other problems."""
    environment = environments.make("single", options={"level": "digit"})
    _, checks = audit.audit(environment, environment, 60, 3)
    assert checks["answer not shown"] == ""
