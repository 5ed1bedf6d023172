"""All properties of a row of the catalogue one after another, in the order of the rows: they share its compiled programs."""
from pathlib import Path

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    rows = {}

    def row(place):
        item = items[place]
        parameters = item.callspec.params
        return rows.setdefault((item.path, *(parameters.get(name) for name in ("row", "slug", "case"))), len(rows))

    for place, item in zip(places, [items[place] for place in sorted(places, key=row)]):
        items[place] = item
