"""The tool `search`: BM25 over the documents of a local JSONL file (Robertson and Zaragoza 2009; arXiv 2407.03618)."""
import functools
import json

from jaxrl_llm.environments.tools import Tool, of_function
from jaxrl_llm.tasks.base import optional
from jaxrl_llm.tasks.jsonl import lines

SHOWN = 1000  # characters of a document


def search(*, path: str, results: int = 3) -> Tool:
    """`search(query)` finds documents in a file with one object per line, `{"title": ..., "text": ...}`, the title optional.

    Raises ValueError without the package bm25s, for a file without documents, and for documents without words to find them by.
    """
    bm25s, index, documents = _index(path)

    def search(query: str) -> str:
        """Searches a collection of documents and returns the best matches.

        Args:
            query: words that the documents hold
        """
        hits = _find(bm25s, index, documents, results, query)
        listed = [f"[{place}] {title}\n{text[:SHOWN]}" for place, (title, text) in enumerate(hits, 1)]
        return "\n\n".join(listed) or "(nothing found)"

    return of_function(search)


def read_documents(path: str) -> list[tuple[str, str]]:
    """`(title, text)` of every line. Raises ValueError with file and line for a line that is no document, or an empty file."""
    documents = []
    for number, line in lines(path):
        try:
            record = json.loads(line)
            title = record.get("title")
            documents.append(("" if title is None else str(title), record["text"]))
            if not isinstance(record["text"], str):
                raise TypeError("its text is not a text")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: expected an object with 'text' and maybe 'title' ({error!r})") from error
    if not documents:
        raise ValueError(f"{path} holds no documents; expected one JSON object a line with 'text' and maybe 'title'")
    return documents


@functools.cache
def _index(path: str) -> tuple:
    """The module, the index and the documents of a file."""
    bm25s = optional("bm25s", "environments")
    documents = read_documents(path)
    index = bm25s.BM25()
    tokens = bm25s.tokenize([f"{title} {text}" for title, text in documents], show_progress=False)
    if not any(tokens.ids):
        raise ValueError(f"{path} holds {len(documents)} documents without a word to find them by: words such as 'the' and "
                         "single characters are not indexed")
    index.index(tokens, show_progress=False)
    return bm25s, index, documents


def _find(bm25s, index, documents: list[tuple[str, str]], results: int, query: str) -> list[tuple[str, str]]:
    """The documents with the highest scores, except documents that share no word with the query."""
    words = bm25s.tokenize(query, return_ids=False, show_progress=False)
    if not words[0]:
        return []
    rows, scores = index.retrieve(words, k=min(results, len(documents)), show_progress=False)
    return [documents[row] for row, score in zip(rows[0].tolist(), scores[0].tolist()) if score > 0]
