"""How far rounding can make one record move a sum, beyond its own share.

Every record's rounding changes when one record comes or goes: it changes the order in which numbers
are added, and the value they are added to. So the distance of two neighbours' sums, as computed, is
at most S_fl = S(1 + ρ). Sums are in float64, with u = 2⁻⁵³.

A sum of N records in blocks of b records on R ranks has at most m = b·T + ⌈N/b⌉ + R + 7 roundings
for each term, T being the number of positions of a record that are added up in the product (1 for a
linear layer of one position). Each sum is then off by at most γ_m·Σ_i γ_i s_i with
γ_m = mu/(1 − mu), where s_i is the sum of the lengths of record i's terms. s_i = ‖g_i‖ where a
record has one term per number.
Elsewhere terms can cancel, and s_i may be far larger than ‖g_i‖; but the norms of such layers are
enlarged by at least T·2⁻²⁴·s_i (`evenclip.gradients.layers.layer.margin`), so weights that clip
these norms to S have γ_i s_i ≤ 2²⁴S/T. Hence

    ρ = 2·N·γ_m·(1 + 2⁻²⁰)                  layers with one term per number
    ρ = 2·N·γ_m·(1 + 2⁻²⁰)·2²⁴/T            layers with positions, m and T of the same layer

and with m ≤ T·(b + N/b + R + 8) the second is at most 2·N·(b + N/b + R + 8)·2⁻²⁹·(1 + 2⁻¹⁰).

N is a number that a batch exceeds with probability τ ≤ 10⁻³⁰ only: for the sum X of independent
coins with mean μ, P(X ≥ N) ≤ exp(N − μ − N·ln(N/μ)) (Chernoff). T·τ is added to δ.
"""

from __future__ import annotations

import math

from evenclip.mechanism.sampling import drawn_rate

__all__ = ["TAU", "covered_records", "most_records", "sum_rounding", "summed_at_once"]

TAU = 1e-30
# Products of positions add up fewer records at once until ρ is at most this, but not fewer than
# that.
_ENOUGH, _FEW = 2.0**-9, 64
_UNIT = 2.0**-53


def covered_records(q: float, B: float) -> int:
    """Return n so that n + 1 records have batches of 2B on average.

    ρ is computed for n and not for the number of records, on which the noise must not depend. Where
    q = B/n, it is about twice that number.

    >>> covered_records(256 / 23484, 256.0)
    46967
    """
    return max(1, math.floor(2 * B / q)) - 1


def most_records(q: float, n: int) -> int:
    """Return N: the batch of a neighbour, up to n + 1 records, exceeds it with probability ≤ TAU.

    >>> most_records(256 / 23484, 23484), most_records(1.0, 100)
    (465, 101)
    """
    mean = drawn_rate(q) * (n + 1)
    low, high = math.floor(mean), n + 1
    while low < high:
        middle = (low + high) // 2
        if _log_tail(middle + 1, mean) <= math.log(TAU):
            high = middle
        else:
            low = middle + 1
    return high


def _log_tail(N: int, mean: float) -> float:
    """Return the bound on ln P(X ≥ N); 0 if N is not above the mean."""
    return min(0.0, N - mean - N * math.log(N / mean)) if mean < N else 0.0


def sum_rounding(
    records: int, block: int | None = None, *, cancelling: bool = False, ranks: int = 1
) -> float:
    """Return ρ for sums of at most `records` records.

    Args:
        records: N.
        block: b, the number of records that one product adds up; None: all of them.
        cancelling: whether a layer adds up positions, or calls, whose terms can cancel.
        ranks: R, the number of processes that add up parts of a batch.

    >>> sum_rounding(467) < 1e-10, sum_rounding(467, cancelling=True) < 1e-3
    (True, True)
    """
    block = records if block is None else min(block, records)
    roundings = block + math.ceil(records / max(block, 1)) + ranks + 8
    if cancelling:
        return 2 * records * roundings * 2.0**24 * _UNIT * (1 + 2.0**-10)
    bound = roundings * _UNIT / (1 - roundings * _UNIT)
    return 2 * records * bound * (1 + 2.0**-10) + 2.0**-45


def summed_at_once(records: int, most: int, *, ranks: int = 1) -> int:
    """Return how many records' positions one product should add up, at most `most`.

    Fewer records make ρ smaller, and the products less efficient.

    >>> summed_at_once(465, 288), summed_at_once(4500, 4160)
    (288, 65)
    """
    # Above √N, larger blocks have more roundings; below it, sums of blocks have.
    few = max(_FEW, math.isqrt(records))
    while most > few and sum_rounding(records, most, cancelling=True, ranks=ranks) > _ENOUGH:
        most = -(-most // 2)
    return most
