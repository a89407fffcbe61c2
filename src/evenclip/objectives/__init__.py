"""What is differentiated, where it is more than the mean loss."""

from evenclip.objectives.fairlens import FairLens

__all__ = ["FairLens"]
