"""Tests of groups of options."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from evenclip.cli import compare, paper, train
from evenclip.cli.options import DataOptions, grouped

MOST_PARAMETERS = 8


@dataclass(frozen=True)
class Colours:
    front: Annotated[str, typer.Option(help="Colour of the letters.")]
    back: Annotated[list[str] | None, typer.Option(help="Colours of the paper.")] = None


@grouped
def paint(
    file: Annotated[Path, typer.Argument(help="File to paint.")],
    *,
    colours: Colours,
    twice: Annotated[bool, typer.Option("--twice")] = False,
) -> None:
    """Paint a file."""
    print(file, colours, twice)


def test_the_fields_of_a_group_stand_in_its_place():
    parameters = inspect.signature(paint).parameters
    assert list(parameters) == ["file", "front", "back", "twice"]
    assert parameters["front"].default is inspect.Parameter.empty
    assert parameters["back"].default is None
    assert (paint.__name__, paint.__doc__) == ("paint", "Paint a file.")


def test_the_command_gets_the_group():
    app = typer.Typer()
    app.command()(paint)
    words = ["x.txt", "--front", "red", "--back", "blue", "--back", "grey"]
    done = CliRunner().invoke(app, words)
    assert done.output == "x.txt Colours(front='red', back=['blue', 'grey']) False\n"
    assert CliRunner().invoke(app, ["x.txt"]).exit_code == 2  # --front is required


def test_zero_counts_as_given():
    assert DataOptions(group_bins=0, unit="id", exclude_group=False).given() == {
        "group_bins": 0,
        "unit": "id",
    }


@pytest.mark.parametrize(
    "command", [compare.compare, train.train, paper.table, paper.figure, paper.all_]
)
def test_a_command_has_few_parameters_of_its_own(command):
    code = inspect.unwrap(command).__code__
    assert code.co_argcount + code.co_kwonlyargcount <= MOST_PARAMETERS
