"""Every kind of file that the package writes: who may read it, and what vouches for it.

A writer names its kind, so this list is complete, and a test damages a file of every kind. `SEALED`
files hold their own checksum, `LISTED` files are in the manifest of their folder, and every line of
a `LINES` file is checked by itself. The SHA-256 of a `NAMED` file is in the specification of every
run that reads it. `UNREAD` files are never read back by the package.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Kind"]

SEALED, LISTED, LINES, NAMED, UNREAD = "sealed", "listed", "lines", "named", "unread"


@dataclass(frozen=True)
class Kind:
    """A kind of file or folder.

    Attributes:
        name: what it is, for messages.
        vouched: SEALED, LISTED, LINES, NAMED or UNREAD.
        remedy: what to do when it is damaged, as the end of a sentence.
        public: whether other users of the machine may read it; false for everything private.
    """

    name: str
    vouched: str
    remedy: str = "make it again"
    public: bool = False

    @property
    def file_mode(self) -> int:
        """Permissions of a file."""
        return 0o644 if self.public else 0o600

    @property
    def folder_mode(self) -> int:
        """Permissions of a folder."""
        return 0o755 if self.public else 0o700


MODEL = Kind("model", LISTED, "train the model again, or take an undamaged copy", public=True)
STATEMENT = Kind(
    "privacy statement", SEALED, "take an undamaged copy from the model's folder", public=True
)
CHECKPOINT = Kind("checkpoint", LISTED, "use another checkpoint")
JOURNAL = Kind("journal", LINES)
RUN = Kind("run", LISTED, "the same command trains it again")
RESULTS = Kind(
    "results file", SEALED, "make it again with `evenclip compare --out`, or pass --unverified"
)
MEASUREMENTS = Kind("measurements of a run", SEALED, "remove the file, and it is made again")
RECORD = Kind("record of a table", SEALED, "make it again with `evenclip paper table`")
OBSERVED = Kind("observed run", SEALED, "remove the file, and make its figure again")
IMAGES = Kind("decoded images", SEALED, "the file is made again")
ROWS = Kind("rows for workers", NAMED, "start the comparison again")
REPORT = Kind("report", UNREAD)
PREDICTIONS = Kind("predictions", UNREAD)
SCHEMA = Kind("schema", UNREAD)
DRAWING = Kind("table or figure of the paper", UNREAD)
TRACEBACKS = Kind("tracebacks", UNREAD)
LOG = Kind("log", UNREAD)

KINDS = tuple(value for value in vars().values() if isinstance(value, Kind))
