"""The sample axis of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Axis"]


@dataclass(frozen=True)
class Axis:
    """The position of the samples in a tensor.

    Attributes:
        at: the axis of the samples; None if all samples share the tensor.
        each: consecutive entries along `at` that belong to one sample.
        one: whether a shared tensor has a leading axis of length 1 in place of the sample axis.

    >>> Axis(1).first(torch.zeros(7, 3), n=3).shape  # positions first, as in recurrent layers
    torch.Size([3, 7])
    >>> Axis(0, each=5).first(torch.zeros(15, 2), n=3).shape  # positions folded into the batch
    torch.Size([3, 5, 2])
    >>> Axis(None).first(torch.zeros(5, 2), n=3).shape  # positional embeddings
    torch.Size([3, 5, 2])
    """

    at: int | None = 0
    each: int = 1
    one: bool = False

    def first(self, x: Tensor, n: int) -> Tensor:
        """Return `x` with the axis of the n samples first."""
        if self.at == 0 and self.each == 1:
            return x
        if self.at is None and not self.one:
            return x.expand(n, *x.shape)
        at, expected = (0, 1) if self.at is None else (self.at, n * self.each)
        if x.shape[at] != expected:
            raise RuntimeError(
                f"A layer of the model has a tensor of shape {list(x.shape)}; for {n} samples it "
                f"should have {expected} entries along axis {at}. Was the model analysed on a "
                "batch of another form?"
            )
        if self.at is None:
            return x.expand(n, *x.shape[1:])
        x = x.movedim(self.at, 0)
        return x if self.each == 1 else x.reshape(n, self.each, *x.shape[1:])

    @staticmethod
    def between(three: torch.Size, two: torch.Size) -> Axis | None:
        """Return the axis that differs between a batch of three samples and a batch of two.

        Return None if there is no single such axis.

        >>> Axis.between(torch.Size([3, 4]), torch.Size([2, 4]))
        Axis(at=0, each=1, one=False)
        >>> Axis.between(torch.Size([7, 12]), torch.Size([7, 8]))
        Axis(at=1, each=4, one=False)
        """
        if len(three) != len(two) or 0 in three:
            return None  # an empty tensor says nothing about its axes
        differ = [axis for axis, (a, b) in enumerate(zip(three, two, strict=True)) if a != b]
        if not differ:
            return Axis(None, one=len(three) > 0 and three[0] == 1)
        at = differ[0]
        each, rest = divmod(three[at], 3)
        if len(differ) > 1 or rest or two[at] != 2 * each or each == 0:
            return None
        return Axis(at, each)
