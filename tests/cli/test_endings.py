"""Endings by an exception: a sentence, a status, and no traceback unless it is requested."""

from __future__ import annotations

import errno

import pytest

from evenclip import cli

INTERNAL = "This is a mistake in evenclip; set EVENCLIP_TRACEBACK=1, run the command again, and"
ENDINGS = [
    (ValueError("epochs is 0; give 1."), 2, "epochs is 0; give 1."),
    (FileNotFoundError("x is not there; give a file."), 2, "x is not there; give a file."),
    (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        2,
        "x cannot be used (No such file or directory); name another one.",
    ),
    (ImportError("No module named 'x'"), 2, "No module named 'x'"),
    (KeyError("x"), 70, f"internal error: KeyError: 'x'. {INTERNAL}"),
    (ValueError("math domain error"), 70, "internal error: ValueError: math domain error. "),
    (RecursionError("too deep"), 70, "internal error: RecursionError: too deep. "),
    (AssertionError(), 70, "internal error: AssertionError. "),
    (KeyboardInterrupt(), 130, "interrupted."),
    (MemoryError(), 71, "memory is used up; "),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
]


@pytest.mark.parametrize(("error", "status", "said"), ENDINGS, ids=lambda v: type(v).__name__)
def test_how_a_command_ends(capsys, monkeypatch, error, status, said):
    def fail(**_):
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.delenv("EVENCLIP_TRACEBACK", raising=False)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == status
    err = capsys.readouterr().err
    assert err.startswith(f"evenclip: {said}" if said else "")
    assert "Traceback" not in err
    assert len(err.splitlines()) == (1 if said else 0)


def test_a_traceback_is_printed_on_request(capsys, monkeypatch):
    def fail(**_):
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setenv("EVENCLIP_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().err.startswith("Traceback")
