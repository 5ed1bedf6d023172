"""Knobs at the door: shapes and ranges of what controllers set, and what nobody reads or two of them set."""
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.control import Controller
from jaxrl_llm.control.knobs import Knob, at_odds, read, unread

KNOBS = (Knob("heat", least=0), Knob("weights", ("N",), 0), Knob("ids", ("B",), most="last"), Knob("sizes", ("B",), 1),
         Knob("stop"))
SIZES = {"N": 3, "last": 2}


def of(*knobs):
    """A controller that says that it sets these."""
    return Controller(lambda: 0, lambda state: {}, lambda state, facts: state, facts=(), knobs=knobs)


def test_what_is_set_is_read_on_the_host():
    values = {"heat": jnp.float32(0.5), "weights": np.array([0, 2.0, 1]), "sizes": jnp.array([4, 1]), "other": object()}
    found = read(KNOBS, {**values, "ids": None}, SIZES)
    assert {name: value.tolist() for name, value in found.items()} == {"heat": 0.5, "weights": [0, 2, 1], "sizes": [4, 1]}
    assert all(isinstance(value, np.ndarray) for value in found.values())
    assert read(KNOBS, {"ids": np.zeros(0, np.int32), "stop": np.bool_(True)}, SIZES)["stop"] == 1


@pytest.mark.parametrize(("values", "said"), [
    ({"heat": -0.5}, r"heat=-0.5 of controller 'c'; give 0 or more$"),
    ({"heat": np.nan}, r"heat=nan of controller 'c'; give 0 or more$"),
    ({"heat": [1.0]}, r"heat of controller 'c' has shape \(1,\) and should have \(\)$"),
    ({"weights": [1, 2]}, r"weights of controller 'c' has shape \(2,\) and should have \(N,\), where N is 3$"),
    ({"weights": [1, -2, 0]}, r"weights of controller 'c' has numbers from -2 to 1; give 0 or more$"),
    ({"ids": [0, 3]}, r"ids of controller 'c' has numbers from 0 to 3; give 2 or less$"),
    ({"ids": [0, -1], "sizes": [1]}, r"sizes of controller 'c' has shape \(1,\) .* \(B,\), where B is 2, as ids has$"),
    ({"ids": 0}, r"ids of controller 'c' has shape \(\) and should have \(B,\)$")])
def test_a_value_of_another_shape_or_range_is_refused_with_its_controller(values, said):
    with pytest.raises(ValueError, match=said):
        read(KNOBS, values, SIZES, dict.fromkeys(values, "c"))


def test_a_value_is_in_the_range_of_each_part_that_reads_it():
    with pytest.raises(ValueError, match="^heat=0.2; give 0.5 or more$"):
        read((Knob("heat", least=0.5), *KNOBS), {"heat": 0.2}, SIZES)


def test_without_a_controller_the_error_names_the_knob_alone():
    with pytest.raises(ValueError, match="^heat=-1; give 0 or more$"):
        read(KNOBS, {"heat": -1}, SIZES)


def test_all_knobs_that_nothing_reads_or_several_set_are_said():
    controllers = {"a": of("heta", "ids"), "b": of("ids", "zzz")}
    assert at_odds(controllers) == ["controllers 'a' and 'b' both set ids; leave one of them out"]
    assert at_odds({"a": of("ids"), "b": of("heat")}) == []
    assert unread(controllers, {"sampling": KNOBS[:2], "the stage 'draw'": KNOBS[2:4]}) == [
        "controller 'a' sets 'heta', which no part of this run reads. Did you mean 'heat', which sampling reads? Knobs are "
        "heat, ids, sizes, weights",
        "controller 'b' sets 'zzz', which no part of this run reads. Knobs are heat, ids, sizes, weights"]
