"""One training over several processes, with the whole model or a part of it on each.

`ranks` has the whole model on every process; `sharded` has a piece of every parameter on each.
"""

from evenclip.distributed.ranks import RankError, Ranks

__all__ = ["RankError", "Ranks"]
