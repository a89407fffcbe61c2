"""The start of the command line, before anything is imported from the current folder.

`python -m evenclip` puts the current folder before all others, and so does an empty entry of
PYTHONPATH. A file `json.py` there would be executed in place of Python's module.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def _leave_current_folder() -> None:
    """Remove the current folder from the path, here and for processes that are started."""
    given = (
        [] if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )
    named = [folder for folder in given if folder]
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        here = ""
    trusted = [os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__))]
    trusted += [os.path.abspath(folder) for folder in named]
    if here not in trusted and os.path.basename(here) not in ("site-packages", "dist-packages"):
        sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    os.environ["PYTHONSAFEPATH"] = "1"
    if named != given:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)


def main() -> None:
    """Run the command line, and exit."""
    _leave_current_folder()
    try:
        os.getcwd()
    except OSError:  # torch's library would end the process with a message of its own
        from evenclip import terminal

        terminal.prepare()
        terminal.say(
            "evenclip: The current folder was deleted; change into another one.", error=True
        )
        sys.exit(2)
    from evenclip.cli import main as run

    run()


if __name__ == "__main__":
    main()
