"""Tools and a parser of one's own, given by name; worker processes import them too."""
import re

from jaxrl_llm.environments.tools import Call, Tool, ToolError


def weather(city: str, days: int = 1) -> dict[str, int]:
    """The weather of a city.

    Args:
        city: where
        days: how many
    """
    if city == "Atlantis":
        raise ToolError("no such city")
    return {city: days}


def dice(*, sides: int = 6) -> Tool:
    """A tool with an option."""
    return Tool("dice", "The sides of a die.", {"type": "object", "properties": {}}, lambda: str(sides))


def other_weather() -> Tool:
    """A second tool of the same name."""
    return Tool("weather", "", {"type": "object", "properties": {}}, lambda: "rain")


def lying() -> Tool:
    """Returns something else than it says."""
    return "a tool"  # type: ignore[return-value]


async def slow(city: str) -> str:
    """Asynchronous."""
    return city


class Weather:
    """A class."""


def called(text: str) -> list[Call]:
    """Calls such as `!weather Bonn`."""
    return [Call(name, {"city": city}) for name, city in re.findall(r"!(\w+) (\w+)", text)]
