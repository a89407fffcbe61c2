"""The privacy mechanism: enforced rule bounds, releases and their ledger, noise, sampling."""

from evenclip.mechanism.calls import wanted
from evenclip.mechanism.mechanism import Mechanism
from evenclip.mechanism.release import Entry, Ledger, LocalTotal, Release, Total, joint_multiplier

__all__ = [
    "Entry",
    "Ledger",
    "LocalTotal",
    "Mechanism",
    "Release",
    "Total",
    "joint_multiplier",
    "wanted",
]
