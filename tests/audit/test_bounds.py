"""The bounds are never violated under their conditions, can be reached, and can fail otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from evenclip.audit.bounds import (
    Conditions,
    clipping_bound,
    direction_bound,
    direction_bound_star,
    unconditional_bound,
)
from evenclip.audit.decomposition import terms


class Problem:
    """Two groups with their own Hessians, per-sample gradients, and batches."""

    def __init__(self, seed, *, indefinite=False, d=4, n=30, batches=12, uneven=1.0):
        random = np.random.default_rng(seed)
        self.lr, self.S = float(np.exp(random.normal())), float(np.exp(random.normal()))
        self.H = [self._hessian(random, d, indefinite) for _ in range(2)]
        shift = random.normal(size=(2, d)) * np.exp(random.normal(size=(2, 1)))
        self.group = random.random(n) < random.uniform(0.1, 0.9)
        self.group[:2] = False, True
        self.each = random.normal(size=(n, d)) * np.exp(uneven * random.normal(size=(n, 1)))
        self.each += shift[self.group.astype(int)]
        lengths = np.linalg.norm(self.each, axis=1)
        self.clipped = self.each * np.minimum(1, self.S / lengths)[:, None]
        self.q = random.uniform(0.05, 1)
        self.B = self.q * n
        picks = random.random((batches, n)) < self.q
        picks[0] = False  # an empty batch
        self.g_B, self.clipped_B = picks @ self.each / self.B, picks @ self.clipped / self.B
        self.g = [self.each[self.group == k].mean(axis=0) for k in (False, True)]

    def _hessian(self, random, d, indefinite):
        basis = np.linalg.qr(random.normal(size=(d, d)))[0]
        values = (
            random.choice([-1, 0, 1], d)
            if indefinite
            else random.uniform(0, 1, d) * random.choice([0, 1], d)
        )
        return basis @ np.diag(values / self.lr) @ basis.T

    @property
    def rho(self):
        long, short = np.linalg.norm(self.g_B, axis=1), np.linalg.norm(self.clipped_B, axis=1)
        return np.where((long > 0) & (short > 0), short / np.where(long > 0, long, 1), 1.0)

    def slopes(self, k):
        return self.g_B @ self.g[k], self.clipped_B @ self.g[k]

    def terms(self, k):
        forms = [np.einsum("bi,ij,bj->b", v, self.H[k], v) for v in (self.g_B, self.clipped_B)]
        plain, clipped = self.slopes(k)
        return terms(plain, forms[0], clipped, forms[1], self.rho, self.lr)

    def difference(self, name):
        return float(np.mean(self.terms(0)[name] - self.terms(1)[name]))

    @property
    def norms(self):
        return np.linalg.norm(self.g_B, axis=1)

    @property
    def clipped_norms(self):
        return np.linalg.norm(self.clipped_B, axis=1)

    def expected_clip(self):
        """Return E(R_clip_a − R_clip_b) over all Poisson batches."""
        total = 0.0
        for sign, k in ((1, 0), (-1, 1)):
            forms = []
            for each in (self.each, self.clipped):
                mean, own = (
                    each.mean(axis=0),
                    np.einsum("ni,ij,nj->n", each, self.H[k], each).mean(),
                )
                forms.append(mean @ self.H[k] @ mean + (1 - self.q) / self.B * own)
            first = self.g[k] @ (self.each - self.clipped).mean(axis=0)
            total += sign * (self.lr * first + self.lr**2 / 2 * (forms[1] - forms[0]))
        return total


def slack(actual, bound, problem):
    return actual - bound + 1e-9 * (1 + abs(actual) + abs(bound))


PROBLEMS = range(1500)


def test_proposition_3_is_never_violated():
    for seed in PROBLEMS:
        p = Problem(seed)
        bound = direction_bound(p.slopes(0), p.slopes(1), p.rho, p.clipped_norms, p.lr)
        assert slack(p.difference("dir"), bound, p) >= 0, seed


def test_proposition_3_star_is_never_violated():
    for seed in PROBLEMS:
        p = Problem(seed)
        bound = direction_bound_star(p.slopes(0), p.slopes(1), p.rho, p.norms, p.lr)
        assert slack(p.difference("dir_star"), bound, p) >= 0, seed


def test_without_convexity_they_are_violated_and_the_other_is_not():
    violated = 0
    for seed in PROBLEMS:
        p = Problem(seed, indefinite=True, d=3, batches=2, uneven=3.0)
        difference = p.difference("dir")
        values = np.linalg.eigvalsh(p.H[0] - p.H[1])
        always = unconditional_bound(
            p.slopes(0),
            p.slopes(1),
            p.rho,
            p.clipped_norms,
            p.lr,
            (float(values[0]), float(values[-1])),
        )
        assert slack(difference, always, p) >= 0, seed
        violated += (
            slack(
                difference,
                direction_bound(p.slopes(0), p.slopes(1), p.rho, p.clipped_norms, p.lr),
                p,
            )
            < 0
        )
    assert violated > 10


def test_the_bound_printed_without_the_square_is_violated():
    """E‖g_B‖ in place of E‖g_B‖², as Proposition 3* is printed."""
    violated = 0
    for seed in PROBLEMS:
        p = Problem(seed, d=3, batches=2, uneven=3.0)
        printed = direction_bound_star(p.slopes(0), p.slopes(1), p.rho, np.sqrt(p.norms), p.lr)
        violated += slack(p.difference("dir_star"), printed, p) < 0
    assert violated > 10


def test_the_bound_of_clipping_is_never_violated_in_expectation():
    for seed in PROBLEMS:
        p = Problem(seed)
        shares = float(np.mean(~p.group)), float(np.mean(p.group))
        spread = (1 - p.q) / p.B
        square = float(
            np.linalg.norm(p.each.mean(axis=0)) ** 2
            + spread * np.mean(np.linalg.norm(p.each, axis=1) ** 2)
        )
        norms = [float(np.linalg.norm(g)) for g in p.g]
        bound = clipping_bound(*norms, *shares, p.S, square, spread, p.lr)
        assert slack(p.expected_clip(), bound, p) >= 0, seed


def test_the_bound_of_clipping_can_be_come_near():
    """The bound is tight up to a small step if all gradients are equal and nothing is clipped."""
    bound = clipping_bound(1.0, 0.0, 1.0, 0.0, 0.0, 1e-9, 0.0, 0.5)
    assert bound == pytest.approx(0.5)


def test_proposition_3_is_reached():
    """g_B and ḡ_B lie along two axes; group a is curved along the first, b along the second."""
    lr, length = 0.25, 0.5
    rho, g_a, g_b = np.array([length]), np.array([0.3, -0.2]), np.array([-0.1, 0.4])
    g_B, clipped = np.array([1.0, 0.0]), np.array([0.0, length])
    H_a, H_b = np.diag([1 / lr, 0.0]), np.diag([0.0, 1 / lr])
    slopes = [(np.array([g @ g_B]), np.array([g @ clipped])) for g in (g_a, g_b)]

    def both(eta):
        """Return R_dir_a − R_dir_b and its bound."""
        directions = []
        for g, H in ((g_a, H_a), (g_b, H_b)):
            values = (
                np.array([v]) for v in (g @ g_B, g_B @ H @ g_B, g @ clipped, clipped @ H @ clipped)
            )
            directions.append(terms(*values, rho, eta)["dir"][0])
        return directions[0] - directions[1], direction_bound(*slopes, rho, np.array([length]), eta)

    assert Conditions.of([(0.0, 1 / lr), (0.0, 1 / lr)], lr).hold
    reached, bound = both(lr)
    assert reached == pytest.approx(bound, abs=1e-12)
    beyond, bound = both(1.01 * lr)
    assert beyond < bound  # the step size violates the condition


def test_conditions():
    fine = Conditions.of([(0.0, 3.0), (-1e-6, 4.0)], lr=0.25)
    assert fine.hold
    assert (fine.largest, fine.smallest) == (4.0, -1e-6)
    assert not Conditions.of([(0.0, 3.0), (0.0, 4.1)], lr=0.25).small_steps
    assert not Conditions.of([(-0.1, 3.0)], lr=0.25).convex


def test_shares_of_more_than_two_groups():
    with pytest.raises(ValueError, match="two groups"):
        clipping_bound(1.0, 1.0, 0.3, 0.3, 1.0, 1.0, 0.0, 0.1)
