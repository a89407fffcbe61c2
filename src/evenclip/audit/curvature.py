"""Slopes, curvature, trace and extreme eigenvalues of the loss at the current parameters.

The Hessian H of a mean loss is never formed. Products Hv cost about two gradients (Pearlmutter
1994, "Fast exact multiplication by the Hessian"). They are computed for many vectors at once, one
chunk of samples after the other, so the memory is that of a few gradients. Forms of chains of
simple layers need no product (`evenclip.audit.taylor`). The quantities are

    slopes    ⟨∇L, v⟩                        forms    vᵀHv
    trace     E vᵀHv over random signs v     (Hutchinson 1990), with its standard error
    extremes  λ_min, λ_max                   (Lanczos, by scipy)

The model is not changed. Dropout is off, so the quantities are those of the model itself, not of a
random draw of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from evenclip import check
from evenclip.arguments import check_kinds
from evenclip.audit import taylor
from evenclip.gradients import Layout
from evenclip.gradients.calls import check_samples, count, taking
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.tape import LossOf

__all__ = ["Curvature", "Estimate", "signs"]

# Maximum number of samples per pass, and of saved activations for all vectors of the pass. The
# limits fit the cache of a CPU, and keep a GPU busy.
_ROWS, _NUMBERS, _NUMBERS_GPU = 1024, 2**24, 2**28
# Up to this many parameters the Hessian is formed for its eigenvalues: Lanczos needs more.
_FEW = 32
# Relative accuracy of eigenvalues.
_ACCURACY = 1e-4


class Estimate(NamedTuple):
    """A number and its standard error: 0 if the number is exact, None if the error is unknown."""

    value: float
    se: float | None


def signs(number: int, size: int, seed: int = 0) -> Tensor:
    """Draw random signs for trace estimates, the same for all groups.  # [number, size], float32"""
    bits = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, size])))
    packed = bits.integers(0, 256, (number, -(-size // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed, axis=1)[:, :size].astype(np.float32) * 2 - 1)


class Curvature:
    """The mean loss of some samples near the current trainable parameters of the model.

    Attributes:
        layout: the parameters, in the order of every vector.
        n: number of samples.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: Any, y: Any, *, parts: int = 1) -> None:
        """Use the samples x and their targets y, with the samples first.

        Args:
            model: any module. Every method reads its current parameters, so it may be trained
                between two calls.
            loss: loss(output, y), averaging, summing or per sample.
            x: input, a tuple of inputs, or a dict of them by name.
            y: targets.
            parts: minimum number of parts of the samples, for a standard error over parts.
        """
        check_kinds(Curvature.__init__, locals())
        check_samples(x, y)
        check.natural(parts=parts)
        self.layout, self.n = Layout.of(model), count(x)
        if not self.n:
            raise ValueError(
                "There are no samples to measure curvature on; leave empty groups out."
            )
        self._whole, self._data = LossOf(model, per_sample(loss)), (x, y)
        self._rows = max(1, min(_ROWS, math.ceil(self.n / max(1, parts))))
        with _without_dropout(model), taking("The model or its loss", "these samples"):
            self._numbers = _saved_numbers(self._whole, tree_map(_first_sample, (x, y)))
        self._product = _forward_over_reverse
        self._taylor = taylor.takes(model) and isinstance(x, Tensor) and isinstance(y, Tensor)

    @property
    def sizes(self) -> Tensor:
        """Number of samples in each part.  # [part], float64"""
        starts = range(0, self.n, self._rows)
        return torch.tensor([min(self._rows, self.n - at) for at in starts], dtype=torch.float64)

    def gradients(self) -> Tensor:
        """Return the mean gradient of every part.  # [part, parameter], float64"""
        with _without_dropout(self._whole.model):
            means = [self._flat(grad(total)(self._parameters())) / n for total, n in self._parts()]
            return torch.stack(means)

    def gradient(self) -> Tensor:
        """Return ∇L.  # [parameter], float64"""
        return self.sizes.to(self.layout.blank.device) @ self.gradients() / self.n

    def products(self, vectors: Tensor) -> Tensor:
        """Return Hv for each vector.  # [vector, parameter] -> [vector, parameter], float64"""
        vectors = vectors.to(self.layout.blank)
        products = torch.zeros_like(vectors, dtype=torch.float64)
        for total, rows in self._parts(_ROWS):
            for some in torch.split(torch.arange(len(vectors)), self._at_once(rows)):
                products[some] += self._mapped(total, vectors[some])
        return products / self.n

    def forms(self, vectors: Tensor) -> Tensor:
        """Return vᵀHv for each vector, part by part.

        [vector, parameter] -> [part, vector], float64
        """
        if self._taylor:
            try:
                return self._taylor_forms(vectors.to(self.layout.blank))
            except (NotImplementedError, RuntimeError):
                self._taylor = False  # the loss has no derivative in forward mode
        vectors, forms = vectors.to(self.layout.blank), list[Tensor]()
        for total, rows in self._parts():
            pieces = torch.split(vectors, self._at_once(rows))
            each = [
                torch.linalg.vecdot(self._mapped(total, some).double(), some.double())
                for some in pieces
            ]
            forms.append(
                torch.cat(each) / rows if each else vectors.new_zeros(0, dtype=torch.float64)
            )
        return torch.stack(forms)

    def _taylor_forms(self, vectors: Tensor) -> Tensor:
        """Return the forms by `taylor`, without a backward pass."""
        x, y = self._data
        parameters = {name.removeprefix("model."): p for name, p in self._parameters().items()}
        forms = []
        rows = _ROWS // self._rows * self._rows  # as many whole parts as fit one pass
        with torch.no_grad():
            for at in range(0, self.n, rows):
                some_x, some_y = x[at : at + rows], y[at : at + rows]
                each = [vectors.new_zeros(0, len(some_x), dtype=torch.float64)]
                for some in torch.split(vectors, self._at_once(len(some_x))):
                    lines = {
                        name.removeprefix("model."): v for name, v in self._split(some).items()
                    }
                    each.append(
                        taylor.forms(
                            self._whole.model, self._whole.loss, some_x, some_y, lines, parameters
                        )
                    )
                forms += [
                    part.mean(dim=1) for part in torch.split(torch.cat(each), self._rows, dim=1)
                ]
        return torch.stack(forms)

    def trace(self, probes: Tensor, of: int | None = None) -> Estimate:
        """Estimate Tr H by Hutchinson's method from random signs.  # probes: [probe, parameter]

        The standard error covers the probes; it is infinite with fewer than two. If the samples
        were drawn from `of` samples, it also covers that draw, by the differences between parts.
        """
        forms = self.forms(probes).cpu()  # [part, probe]
        mean = self.sizes @ forms / self.n
        square = float(mean.var() / len(mean)) if len(mean) > 1 else math.inf
        if of is not None:
            each = forms.mean(dim=1)
            square += (
                float(each.var() / len(each)) * (1 - self.n / of) if len(each) > 1 else math.inf
            )
        return Estimate(float(mean.mean()), math.sqrt(square))

    def exact_trace(self) -> float:
        """Compute Tr H with one product per parameter, for small models."""
        size, total = self.layout.size, 0.0
        for first in range(0, size, 256):
            units = torch.zeros(min(256, size - first), size)
            units[torch.arange(len(units)), first + torch.arange(len(units))] = 1.0
            total += (
                float((self.sizes.to(self.layout.blank.device) @ self.forms(units)).sum()) / self.n
            )
        return total

    def extremes(self) -> tuple[float, float]:
        """Return (λ_min, λ_max) of H, each to about four digits of the larger one."""
        return extremes(self.products, self.layout.size)

    # --- private ---

    def _parameters(self) -> dict[str, Tensor]:
        """Return the current trainable parameters."""
        model = self._whole.model
        return {
            f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad
        }

    def _parts(
        self, size: int | None = None
    ) -> Iterator[tuple[Callable[[dict[str, Tensor]], Tensor], int]]:
        """Yield each part's summed loss as a function of the parameters, and its sample count."""
        step = size or self._rows
        for at in range(0, self.n, step):
            x, y = tree_map(
                lambda v, at=at: v[at : at + step] if isinstance(v, Tensor) else v, self._data
            )

            def total(parameters: dict[str, Tensor], x: Any = x, y: Any = y) -> Tensor:
                losses: Tensor = functional_call(self._whole, parameters, (x, y))
                return losses.sum()

            yield total, count(x)

    def _at_once(self, rows: int) -> int:
        numbers = _NUMBERS_GPU if self.layout.blank.is_cuda else _NUMBERS
        return max(1, numbers // max(1, rows * self._numbers))

    def _mapped(self, total: Callable[[dict[str, Tensor]], Tensor], vectors: Tensor) -> Tensor:
        """Return Σ_i H_i v for each v.  # [vector, parameter]"""
        with _without_dropout(self._whole.model):
            try:
                return self._product(total, self._parameters(), self._split(vectors))
            except (NotImplementedError, RuntimeError):
                if self._product is _reverse_over_reverse:
                    raise
            # Some operations (recurrent ones) have no derivative in forward mode.
            self._product = _reverse_over_reverse
            return self._product(total, self._parameters(), self._split(vectors))

    def _split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Split the vectors by parameter.  # name -> [vector, *parameter]"""
        layout = self.layout
        pieces = torch.split(vectors, list(layout.sizes), dim=1)
        named = zip(layout.names, layout.shapes, pieces, strict=True)
        return {f"model.{name}": piece.reshape(-1, *shape) for name, shape, piece in named}

    def _flat(self, gradients: dict[str, Tensor]) -> Tensor:
        pieces = [gradients[f"model.{name}"].reshape(-1) for name in self.layout.names]
        return torch.cat(pieces).double()


def extremes(products: Callable[[Tensor], Tensor], size: int) -> tuple[float, float]:
    """Return (λ_min, λ_max) of a symmetric matrix.

    Args:
        products: products with the matrix.  # [vector, number] -> [vector, number]
        size: number of rows.
    """
    if size <= _FEW:
        matrix = products(torch.eye(size, dtype=torch.float64)).cpu()
        values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
        return float(values[0]), float(values[-1])
    from scipy.sparse.linalg import LinearOperator, eigsh  # scipy is not needed for training

    def product(v: Any) -> Any:
        return products(torch.from_numpy(np.ascontiguousarray(v.reshape(1, -1))))[0].cpu().numpy()

    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.Generator(np.random.PCG64(size)).standard_normal(size)
    (largest,) = eigsh(
        operator, k=1, which="LM", tol=_ACCURACY, v0=start, return_eigenvectors=False
    )
    # The other end of the spectrum is the largest eigenvalue of the shifted matrix. It has the same
    # accuracy relative to the first, and is found as fast.
    moved = LinearOperator(
        (size, size),
        matvec=lambda v: product(v) - largest * np.asarray(v).ravel(),
        dtype=np.float64,
    )
    (other,) = eigsh(moved, k=1, which="LM", tol=_ACCURACY, v0=start, return_eigenvectors=False)
    ends = sorted((float(largest), float(largest + other)))
    return ends[0], ends[1]


Total = Callable[[dict[str, Tensor]], Tensor]


def _forward_over_reverse(
    total: Total, parameters: dict[str, Tensor], vectors: dict[str, Tensor]
) -> Tensor:
    """Return the derivatives of the gradient along all vectors at once."""

    def along(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        product: dict[str, Tensor] = jvp(grad(total), (parameters,), (vector,))[1]
        return product

    with warnings.catch_warnings():
        # torch itself raises this on the first use.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        products = vmap(along)(vectors)
    return torch.cat([products[name].flatten(1) for name in vectors], dim=1)


def _reverse_over_reverse(
    total: Total, parameters: dict[str, Tensor], vectors: dict[str, Tensor]
) -> Tensor:
    """Return the gradient of ⟨gradient, v⟩, vector by vector."""
    with _twice_differentiable(), torch.enable_grad():
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        first = torch.autograd.grad(
            total(leaves), list(leaves.values()), create_graph=True, allow_unused=True
        )
        pairs = [
            (g, name)
            for g, name in zip(first, leaves, strict=True)
            if g is not None and g.requires_grad
        ]
        rows = []
        for i in range(len(next(iter(vectors.values())))):
            second = torch.autograd.grad(
                [g for g, _ in pairs],
                list(leaves.values()),
                [vectors[name][i] for _, name in pairs],
                retain_graph=True,
                allow_unused=True,
            )
            filled = [
                torch.zeros_like(p) if s is None else s
                for s, p in zip(second, leaves.values(), strict=True)
            ]
            rows.append(torch.cat([g.reshape(-1) for g in filled]))
    return torch.stack(rows).detach()


@contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Disable the libraries whose recurrent layers or attention have no second derivative."""
    with (
        torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        torch.backends.cudnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout rate to 0 temporarily.

    Evaluation mode is not used, because some layers run other code in it.
    """
    rates = {
        nn.modules.dropout._DropoutNd: "p",
        nn.MultiheadAttention: "dropout",
        nn.RNNBase: "dropout",
    }
    dropouts = [
        (m, name, getattr(m, name))
        for m in model.modules()
        for kind, name in rates.items()
        if isinstance(m, kind)
    ]
    try:
        for module, name, _ in dropouts:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in dropouts:
            setattr(module, name, rate)


def _saved_numbers(whole: nn.Module, sample: Any) -> int:
    """Count the numbers that autograd saves for one sample's backward pass, except parameters."""
    own, numbers = {p.untyped_storage().data_ptr() for p in whole.parameters()}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += 0 if tensor.untyped_storage().data_ptr() in own else tensor.numel()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        whole(*sample)
    given = sum(leaf.numel() for leaf in tree_leaves(sample) if isinstance(leaf, Tensor))
    return max(numbers, given, 1)


def _first_sample(value: Any) -> Any:
    """Return the first sample of a tensor, with its axis; return other values unchanged."""
    return value[:1] if isinstance(value, Tensor) else value
