"""Draws where the parts of a method act on a batch, with the keys that name them.

  python experiments/draw_parts.py --out=docs/figures/parts.png
"""
from typing import NamedTuple

from absl import flags

from jaxrl_llm.commands import command_line


class Station(NamedTuple):
    """A station of a batch: what happens, and `(key, example)` of the parts that decide it."""

    title: str
    parts: tuple[tuple[str, str], ...]


STATIONS = (
    Station("problems and\nrollouts", (("topology", "single"), ("allocation", "dars"), ("guidance", "adhint(high=0.5)"))),
    Station("what is kept", (("filters", "dynamic_sampling"), ("replay", "self_imitation"))),
    Station("what is\nmeasured", (("recorders", "teacher"),)),
    Station("advantages", (("estimator", "rloo"), ("replay_estimator", "spear"))),
    Station("loss", (("objective", "cispo + kl(0.01)"), ("replay_objective", "clip_cov"))),
)
CONTROLLERS = ("controllers", "siri(period=40), pass_rate")
_WIDTH, _GAP, _TOP, _LOW = 1.9, 0.42, 1.62, -0.1


def main():
    from jaxrl_llm.tools.figures import COLORS, figure_file
    with figure_file(OUT.value, 11.6, 3.5) as figure:
        axes = figure.subplots()
        axes.set(xlim=(-0.1, len(STATIONS) * (_WIDTH + _GAP) - _GAP + 0.1), ylim=(-1.25, 2.25), xticks=[], yticks=[])
        axes.axis("off")
        for number, station in enumerate(STATIONS):
            left = number * (_WIDTH + _GAP)
            _box(axes, left, _LOW, _WIDTH, _TOP - _LOW, COLORS[0])
            axes.text(left + _WIDTH / 2, _TOP + 0.3, station.title, ha="center", va="center", weight="bold", linespacing=1.1)
            for place, (key, example) in enumerate(station.parts):
                _part(axes, left + _WIDTH / 2, _TOP - 0.27 - 0.54 * place, key, example)
            if number + 1 < len(STATIONS):
                _arrow(axes, (left + _WIDTH + 0.03, 0.8), (left + _WIDTH + _GAP - 0.03, 0.8), COLORS[7])
        right = len(STATIONS) * (_WIDTH + _GAP) - _GAP
        _box(axes, 1.6, -1.15, right - 3.2, 0.62, COLORS[1])
        _part(axes, right / 2, -0.74, *CONTROLLERS)
        _arrow(axes, (right - _WIDTH / 2, _LOW - 0.04), (right - 1.62, -0.8), COLORS[1], "facts of a step",
               (right - 0.62, -0.55))
        _arrow(axes, (1.58, -0.8), (_WIDTH / 2, _LOW - 0.04), COLORS[1], "knobs of the next", (0.5, -0.55))
    print(OUT.value)


def _box(axes, left: float, low: float, width: float, height: float, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch
    axes.add_patch(FancyBboxPatch((left, low), width, height, boxstyle="round,pad=0,rounding_size=0.08", edgecolor=color,
                                  facecolor=f"{color}12", linewidth=1.4))


def _part(axes, middle: float, height: float, key: str, example: str) -> None:
    axes.text(middle, height, key, ha="center", va="center", family="monospace", weight="bold", fontsize=9.5)
    axes.text(middle, height - 0.22, example, ha="center", va="center", family="monospace", fontsize=7.8, color="#555555")


def _arrow(axes, start, end, color: str, text: str = "", place=(0.0, 0.0)) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.4})
    axes.text(*place, text, ha="center", va="center", fontsize=8.5, color=color)


if __name__ == "__main__":  # an import of the stations defines no flag
    OUT = flags.DEFINE_string("out", "docs/figures/parts.png", "The picture.")
    command_line.run(main)
