"""The digest of the package's own sources."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

__all__ = ["OTHERS", "sources"]

# Packages that compute nothing that a run depends on.
OTHERS = ("cli", "report", "reproduction")


@lru_cache(maxsize=1)
def sources() -> str:
    """Return a digest of all sources that a run may depend on.

    Two versions of the package may round a sum differently.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in OTHERS:
            content = path.read_bytes()
            digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
