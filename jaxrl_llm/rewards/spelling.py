r"""One spelling of what LaTeX and keyboards write in several ways: `√3` and `\sqrt{3}`, `\pmod 4` and `\pmod{4}`."""
import re

_SIGNS = {"\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": r"\div ", "\u2212": "-", "\u00b1": r"\pm ",
          "\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ", "\u2248": r"\approx ", "\u2261": r"\equiv ",
          "\u2208": r"\in ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u221e": r"\infty ", "\u2205": r"\emptyset ",
          "\u03c0": r"\pi ", "\u00b0": r"^\circ ", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2026": r"\ldots ",
          **{sign: f"^{{{digit}}}" for sign, digit in zip("\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "23456789")}}
_TABLE = str.maketrans(_SIGNS)
_ROOT = re.compile(r"\u221a\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()\u221a]*)\)|(?=\{))")
_MODULUS = re.compile(r"\\pmod\s*(?:\{\s*(\w+(?:\.\d+)?)\s*\}|(\w+(?:\.\d+)?))|"
                      r"\(\s*(?:\\(?:text|mathrm)\{\s*mod\s*\}|\\b?mod(?![a-z])|mod\s)\s*(\w+)\s*\)")
_COLOUR = re.compile(r"\\(?:textcolor|color)\s*(?:\[[A-Za-z]*\])?\{[A-Za-z0-9!.,\s]*\}")
_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\(?:display|text)style(?![a-z])|\\!\s*")
_GROUPS, _THIN = re.compile(r"(?<=\d)\\[,;:] ?(?=\d)"), re.compile(r"\\[,;:]")
_IMAGINARY = re.compile(r"(?<=\d) (?=i(?![A-Za-z]))")  # 4 i is 4i
_NAMES = re.compile(r"\\(?:[dtc]frac|[mh]box|varnothing|le|ge|ne)(?![A-Za-z])")
_LONG = 1000  # characters; a longer text is no chain of equations, and every side takes some microseconds
_WHOLE, _LAYERS = re.compile(r"(?<![\d.])(\d+)\.0+(?![\d.])"), 3
_SAME = {r"\mbox": r"\text", r"\hbox": r"\text",
         r"\varnothing": r"\emptyset", r"\le": r"\leq", r"\ge": r"\geq", r"\ne": r"\neq"}


def normalise(text: str) -> str:
    r"""The text in one spelling, without layout: dollars and a final full stop, `\left \right`, spaces, colours, `\dfrac`."""
    text = _ROOT.sub(_root, text.replace("{,}", ",").replace(r"\$", "")).translate(_TABLE)
    text = _COLOUR.sub("", _THIN.sub(" ", _GROUPS.sub("", _LAYOUT.sub("", text))))
    text = _MODULUS.sub(lambda match: rf"\pmod{{{next(filter(None, match.groups()))}}}", text)
    text = _NAMES.sub(lambda match: _SAME.get(match.group(), r"\frac"), text)
    text = _IMAGINARY.sub("", " ".join(text.split())).lstrip("$ ").rstrip("$ .")
    text = _without_repeats(text) if "=" in text and len(text) <= _LONG else text
    return text + "$" * (text.count("$") % 2)  # words before a formula


def compact(text: str) -> str:
    r"""The normalised text without spaces and brackets that mean nothing: `(n \equiv 1)` is `n\equiv1`, `x^{2}` is `x^2`.

    A decimal without a fraction is an integer: `1.0` is `1`.
    """
    text = re.sub(r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", text.replace("\\ ", " "))
    for _ in range(_LAYERS):
        if (inner := unwrapped(text)) is None or (text.endswith(")") and re.search("[,;]", inner) and "=" not in inner):
            break
        text = inner.strip()
    text = _WHOLE.sub(r"\1", text)
    text = re.sub(r"([_^])\{([A-Za-z0-9])\}", r"\1\2", text)
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _without_repeats(text: str) -> str:
    """A chain of equations without the sides that come again later: `x = 1 = x = 1` is `x = 1`."""
    kept = {compact(side): side for side in reversed(split(text, "="))}
    return "=".join(reversed(kept.values())).strip()


def split(text: str, separators: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        if character in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def unwrapped(text: str) -> str | None:
    r"""The content of the parentheses, braces or `\text{}` that enclose the whole text; None if there are none."""
    text, depth = text.removeprefix(r"\text").strip(), 0
    for position, character in enumerate(text):
        depth += (character in "{(") - (character in "})")
        if depth <= 0:
            return text[1:-1] if 0 < position == len(text) - 1 and depth == 0 else None
    return None


def _root(match: re.Match) -> str:
    inner = match[1] or match[2]
    return r"\sqrt" if inner is None else rf"\sqrt{{{inner}}}"
