"""Tests of the progress displays."""

from __future__ import annotations

import io

from rich.console import Console

from evenclip.report.live import Lines, Live
from evenclip.sweep.executor import Failure
from evenclip.sweep.spec import Spec

SPECS = [Spec({"name": "toy"}, {"name": "mlp"}, {"name": rule}, 0.1, 1, 32, None, None, seed=3)
         for rule in ("dpsgd", "dpsgd-f")]  # fmt: skip


def drawn(live, width=80):
    """Return what the display shows on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(live._draw())
    return console.file.getvalue()


def test_a_terminal_shows_what_runs_what_is_done_and_the_time_left():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Live(terminal) as live:
        assert "0 of 0 runs" in drawn(live)
        live.planned(4)
        for spec in SPECS:
            live.started(spec)
        live.step(SPECS[0], 120)
        text = drawn(live)
        assert "0 of 4 runs" in text
        assert "left" not in text
        assert "dpsgd, seed 3, lr 0.1" in text
        assert "step 120" in text
        live.ended(SPECS[0], None)
        live.ended(SPECS[1], Failure(SPECS[1], "its process was ended by SIGKILL"))
        text = drawn(live)
        assert "2 of 4 runs" in text
        assert "s left" in text
        assert "failed: dpsgd-f, seed 3, lr 0.1: its process was ended by SIGKILL" in " ".join(
            text.split()
        )
    assert max(map(len, text.splitlines())) <= 80


def test_elsewhere_a_line_for_each_run(capsys):
    with Lines() as lines:
        lines.planned(2)
        lines.started(SPECS[0])
        lines.step(SPECS[0], 5)
        lines.ended(SPECS[0], None)
        lines.ended(SPECS[1], Failure(SPECS[1], "no space"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("1/2 dpsgd, seed 3, lr 0.1: ")
    assert second == "2/2 dpsgd-f, seed 3, lr 0.1: failed: no space"
