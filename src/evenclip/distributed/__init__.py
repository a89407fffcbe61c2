"""One training over several processes: `Ranks`, whole models on each; `sharded`, a piece of every
parameter on each.
"""

from evenclip.distributed.ranks import RankError, Ranks

__all__ = ["RankError", "Ranks"]
