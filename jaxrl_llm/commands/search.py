"""Finds named things by words: methods and their numbers, keys of the configuration, recipes, tasks, environments and so on.

  jaxrl_llm search entropy            # or python -m jaxrl_llm.commands.search
  jaxrl_llm search 2402.03300         # the rows of a paper
  jaxrl_llm search bnpo               # what a loss of TRL, verl or another code base is here
"""
import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm import methods
from jaxrl_llm.methods import known_as
from jaxrl_llm.tools.registry import nearest


class SearchEntry(NamedTuple):
    """Something that a run can name: its kind, its name, its form on a command line, and a description."""

    kind: str
    name: str
    usage: str
    about: str


def entries() -> Iterator[SearchEntry]:
    """All entries, by kind."""
    from jaxrl_llm import environments, rewards, tasks
    from jaxrl_llm.commands.command_line import recipe_titles
    from jaxrl_llm.learning import optimizers
    from jaxrl_llm.setup import config_page
    for row in methods.METHODS.values():
        paper = f" (arXiv {', '.join(row.arxiv)})" if row.arxiv else ""
        about = f"{row.title}{paper}: {row.equation}{_peers(row.known_as)}"
        yield SearchEntry("methods", row.slug, f"--config.method={row.slug}", about)
    for number in known_as.NUMBERS:
        usage = f'--config.{number.key}="{number.text}"'
        yield SearchEntry("numbers", number.text, usage, f"{number.about}{_peers(number.known_as)}")
    for key in config_page.all_keys():
        if key.default is not None:
            yield SearchEntry("keys", key.name, f"--config.{key.name}={key.default}", key.meaning)
    for name, title in recipe_titles().items():
        yield SearchEntry("recipes", name, f"--config={name}", title)
    for kind, key, table in (("tasks", "task", tasks.TASKS), ("rewards", "rewards", rewards.REWARDS),
                             ("environments", "environment", environments.factories())):
        for name, one in sorted(table.items()):
            yield SearchEntry(kind, name, f"--config.{key}={name}", (one.make.__doc__ or "").strip().partition("\n")[0])
    for name in optimizers.TABLE:
        yield SearchEntry("optimizers", name, f"--config.optimizer.name={name}", "an optimiser of optax")


def _peers(names: tuple[str, ...]) -> str:
    return f" [{known_as.said(names)}]" if names else ""


def matching(words: list[str]) -> list[SearchEntry]:
    """The entries in which every word occurs, those with a word in their name first within each kind.

    Capital letters are equal to small ones, and "-" to "_".
    """
    words = [_plain(word) for word in words]
    matches = [entry for entry in entries() if all(word in _plain(" ".join(entry)) for word in words)]
    kinds = list(dict.fromkeys(entry.kind for entry in matches))
    return sorted(matches, key=lambda entry: (kinds.index(entry.kind), not any(word in _plain(entry.name) for word in words)))


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")


def main() -> None:
    parser = argparse.ArgumentParser(prog="jaxrl_llm search", description="finds methods, keys, recipes, tasks, rewards and "
                                     "environments in whose names or descriptions all words occur")
    parser.add_argument("words", nargs="+", metavar="WORD")
    words = parser.parse_args().words
    matches, kind = matching(words), None
    if not matches:
        near = nearest(" ".join(words), {entry.name for entry in entries()}, 5)
        sys.exit(f"nothing has {' and '.join(map(repr, words))}" + (f"; near: {', '.join(near)}" if near else ""))
    for entry in matches:
        if entry.kind != kind:
            kind = entry.kind
            print(f"\n{kind}")
        print(f"  {entry.usage:44} {entry.about}")


if __name__ == "__main__":
    main()
