"""The catalogue of datasets: every module of this room that defines a `SOURCE`, by name.

SOURCES["adult"].load(seed=0)                  training and test data
SOURCES["mnist"].missing(data_directory())     files that the data directory lacks

A new dataset is one new module; nothing else names it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from evenclip.data.disk import File, data_directory
from evenclip.data.source import Source

__all__ = ["SOURCES", "File", "Source", "data_directory"]

FIRST = ("adult", "dutch", "mnist", "celeba")
"""The paper's datasets, which are listed first; the others follow in alphabetical order."""

_DEFINITION = re.compile(r"^SOURCE\b.*=", re.MULTILINE)


def _sources() -> Iterator[Source]:
    """Yield the `SOURCE` of each dataset's module.

    The other modules are not imported, because some of them import pandas.
    """
    room = Path(__file__).parent
    for module in pkgutil.iter_modules([str(room)]):
        spec = PathFinder.find_spec(module.name, [str(room)])
        if spec is None or spec.loader is None:
            continue
        text = spec.loader.get_source(module.name)  # type: ignore[attr-defined]
        if text is not None and _DEFINITION.search(text):
            source = importlib.import_module(f"evenclip.data.{module.name}").SOURCE
            assert isinstance(source, Source)
            yield source


def _rank(source: Source) -> tuple[int, str]:
    """Return the position of a dataset in the catalogue."""
    return (FIRST.index(source.name) if source.name in FIRST else len(FIRST), source.name)


SOURCES: dict[str, Source] = {source.name: source for source in sorted(_sources(), key=_rank)}
"""Every dataset by its name."""
