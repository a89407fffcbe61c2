"""The privacy mechanism: enforced rule bounds, releases and their ledger, noise, sampling."""

from evenclip.mechanism.calls import wanted
from evenclip.mechanism.mechanism import Mechanism
from evenclip.mechanism.release import Entry, Ledger, Release, Share, joint_multiplier

__all__ = [
    "Entry",
    "Ledger",
    "Mechanism",
    "Release",
    "Share",
    "joint_multiplier",
    "wanted",
]
