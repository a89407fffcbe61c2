"""Write output files atomically."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write"]


def write(path: Path, text: str) -> None:
    """Write to a scratch file and rename it, so that readers never see a partial file."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}); choose another --out."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
