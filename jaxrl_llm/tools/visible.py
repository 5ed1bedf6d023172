"""Makes text of unknown origin safe to display: nothing stays invisible or controls a terminal or the writing direction."""
import re

# Default_Ignorable_Code_Point of Unicode, as far as categories do not tell it: a joiner, fillers and variation selectors are
# marks and letters.
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def visible(text: str) -> str:
    r"""The text with every invisible character spelled out, such as \x1b, \u202e or \U000e0041; \n and \t stay.

    These are the categories C (controls, formats, surrogates, private and unassigned ones) and Z except the space, and the
    characters that Unicode says to ignore. The viewer's page does the same to completions, except for spaces of other widths,
    by `HIDDEN` in page.js.
    """
    if text.isprintable() and not _IGNORABLE.search(text):
        return text
    def hidden(c):
        return not (c.isprintable() or c in "\n\t") or _IGNORABLE.match(c)
    return "".join(c.encode("unicode_escape").decode() if hidden(c) else c for c in text)
