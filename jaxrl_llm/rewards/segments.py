"""Whether a predicted segment is how the text goes on (RLPT, arXiv 2509.19249): a rule in place of the paper's judge."""
import re

BEGIN, END = "<|startofprediction|>", "<|endofprediction|>"  # around a prediction
_UNIT = {"word": re.compile(r"\w+|[^\w\s]"), "character": re.compile(r"\S")}


def prediction(completion: str, tags: bool = True) -> str | None:
    """The text between the last pair of marks, or all of the completion without `tags`; None where nothing is left."""
    if tags:
        _, begun, rest = completion.rpartition(BEGIN)
        completion, ended, _ = rest.partition(END)
        if not (begun and ended):
            return None
    return completion.strip() or None


def is_prefix(predicted: str, reference: str, unit: str = "word", least: int = 3) -> bool:
    """Whether the units of `predicted`, `least` or more, are the first ones of `reference`.

    A reference of fewer units has to be predicted whole. Units are words and marks, or visible characters, as they are written.
    """
    mine, theirs = (_UNIT[unit].findall(text) for text in (predicted, reference))
    return min(least, len(theirs)) <= len(mine) and len(mine) > 0 and mine == theirs[:len(mine)]
