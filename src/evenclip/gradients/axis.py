"""Where the samples lie in a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Axis"]


@dataclass(frozen=True)
class Axis:
    """The samples lie along axis `at`, `each` consecutive entries a sample; nowhere (`at` is None)
    if all share the tensor.

    >>> Axis(1).first(torch.zeros(7, 3), n=3).shape  # position first, as recurrent layers like it
    torch.Size([3, 7])
    >>> Axis(0, each=5).first(torch.zeros(15, 2), n=3).shape  # positions folded into the batch
    torch.Size([3, 5, 2])
    >>> Axis(None).first(torch.zeros(5, 2), n=3).shape  # a table of positions
    torch.Size([3, 5, 2])
    """

    at: int | None = 0
    each: int = 1
    # where all share the tensor: whether an axis of one in front keeps the samples' place
    one: bool = False

    def first(self, x: Tensor, n: int) -> Tensor:
        """`x` with an axis of the n samples in front."""
        if self.at == 0 and self.each == 1:
            return x
        if self.at is None and not self.one:
            return x.expand(n, *x.shape)
        at, expected = (0, 1) if self.at is None else (self.at, n * self.each)
        if x.shape[at] != expected:
            raise RuntimeError(
                f"A layer of the model has a tensor of shape {list(x.shape)}, where it should "
                f"have {expected} entries "
                f"along axis {at} for {n} samples. Was the model taken apart on a batch that is "
                "unlike this one?"
            )
        if self.at is None:
            return x.expand(n, *x.shape[1:])
        x = x.movedim(self.at, 0)
        return x if self.each == 1 else x.reshape(n, self.each, *x.shape[1:])

    @staticmethod
    def between(three: torch.Size, two: torch.Size) -> Axis | None:
        """The axis that tells a batch of three samples from one of two; None if there is no single
        such axis.

        >>> Axis.between(torch.Size([3, 4]), torch.Size([2, 4]))
        Axis(at=0, each=1, one=False)
        >>> Axis.between(torch.Size([7, 12]), torch.Size([7, 8]))
        Axis(at=1, each=4, one=False)
        """
        if len(three) != len(two) or 0 in three:
            return None  # nothing went through: nothing can be told
        differ = [axis for axis, (a, b) in enumerate(zip(three, two, strict=True)) if a != b]
        if not differ:
            return Axis(None, one=len(three) > 0 and three[0] == 1)
        at = differ[0]
        each, rest = divmod(three[at], 3)
        if len(differ) > 1 or rest or two[at] != 2 * each or each == 0:
            return None
        return Axis(at, each)
