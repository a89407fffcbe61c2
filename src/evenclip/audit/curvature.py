"""The loss of some samples around the parameters as they stand: slopes, curvature, trace and
extreme eigenvalues.

The Hessian H of a mean loss is never formed. Products Hv cost about two gradients (Pearlmutter
1994, "Fast exact multiplication by the Hessian") and are taken for many vectors at once, a chunk of
samples after the other; so the memory is that of a few gradients. Forms of chains of simple layers
need no product (`evenclip.audit.taylor`). There are

    slopes    ⟨∇L, v⟩                        forms    vᵀHv
    trace     E vᵀHv over random signs v     (Hutchinson 1990), with its standard error
    extremes  λ_min, λ_max                   (Lanczos, by scipy)

They look at the model and change nothing. Dropout is left out: what is looked at is the model
itself, not a draw of it.
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

from evenclip.audit import taylor
from evenclip.gradients import Layout
from evenclip.gradients.losses import Loss, per_sample
from evenclip.gradients.tape import LossOf, count

__all__ = ["Curvature", "Estimate", "signs"]

# Samples that pass at once, at the most, and numbers that are kept on the way for all vectors that
# pass with them: what a cache likes, or what a GPU needs to be busy.
_ROWS, _NUMBERS, _NUMBERS_GPU = 1024, 2**24, 2**28
# A model of fewer parameters than this has its Hessian formed for its eigenvalues: Lanczos needs
# room to search.
_FEW = 32
# Relative accuracy of eigenvalues.
_ACCURACY = 1e-4


class Estimate(NamedTuple):
    """A number, and its standard error: 0 where it is exact."""

    value: float
    se: float


def signs(number: int, size: int, seed: int = 0) -> Tensor:
    """Random signs to estimate a trace by, the same for every group.  # [number, size], float32"""
    bits = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, size])))
    packed = bits.integers(0, 256, (number, -(-size // 8)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed, axis=1)[:, :size].astype(np.float32) * 2 - 1)


class Curvature:
    """The mean loss of some samples, as a function of the model's trainable parameters, near where
    they are now.

    Attributes:
        layout: the parameters, in the order of every vector.
        n: number of samples.
    """

    def __init__(self, model: nn.Module, loss: Loss, x: Any, y: Any, *, parts: int = 1) -> None:
        """Samples x and their targets y, with the samples first.

        Args:
            model: any module; it is read again for every question, so that it may be trained on
                between them.
            loss: loss(output, y), averaging, summing or per sample.
            x: input, a tuple of inputs, or a dict of them by name.
            y: targets.
            parts: into how many parts the samples fall, at the least, for a standard error over
                them.
        """
        self.layout, self.n = Layout.of(model), count(x)
        if not self.n:
            raise ValueError(
                "There are no samples to take the curvature of; leave empty groups out."
            )
        self._whole, self._data = LossOf(model, per_sample(loss)), (x, y)
        self._rows = max(1, min(_ROWS, math.ceil(self.n / max(1, parts))))
        with _without_dropout(model):
            self._numbers = _kept(self._whole, tree_map(_one, (x, y)))
        self._product = _forward_over_reverse
        self._jets = taylor.takes(model) and isinstance(x, Tensor) and isinstance(y, Tensor)

    @property
    def sizes(self) -> Tensor:
        """Samples in each part.  # [part], float64"""
        starts = range(0, self.n, self._rows)
        return torch.tensor([min(self._rows, self.n - at) for at in starts], dtype=torch.float64)

    def gradients(self) -> Tensor:
        """The mean gradient of every part.  # [part, parameter], float64"""
        with _without_dropout(self._whole.model):
            return torch.stack(
                [
                    self._flat(grad(total)(self._parameters())) / rows
                    for total, rows in self._parts()
                ]
            )

    def gradient(self) -> Tensor:
        """∇L.  # [parameter], float64"""
        return self.sizes.to(self.layout.blank.device) @ self.gradients() / self.n

    def products(self, vectors: Tensor) -> Tensor:
        """Hv for each of the vectors.  # [vector, parameter] -> [vector, parameter], float64"""
        vectors = vectors.to(self.layout.blank)
        found = torch.zeros_like(vectors, dtype=torch.float64)
        for total, rows in self._parts(_ROWS):
            for some in torch.split(torch.arange(len(vectors)), self._at_once(rows)):
                found[some] += self._mapped(total, vectors[some])
        return found / self.n

    def forms(self, vectors: Tensor) -> Tensor:
        """vᵀHv for each of the vectors, part by part.  # [vector, parameter] -> [part, vector],
        float64
        """
        if self._jets:
            try:
                return self._by_jets(vectors.to(self.layout.blank))
            except (NotImplementedError, RuntimeError):
                self._jets = False  # a loss without a derivative in forward mode
        vectors, found = vectors.to(self.layout.blank), list[Tensor]()
        for total, rows in self._parts():
            pieces = torch.split(vectors, self._at_once(rows))
            each = [
                torch.linalg.vecdot(self._mapped(total, some).double(), some.double())
                for some in pieces
            ]
            found.append(
                torch.cat(each) / rows if each else vectors.new_zeros(0, dtype=torch.float64)
            )
        return torch.stack(found)

    def _by_jets(self, vectors: Tensor) -> Tensor:
        """The same without a pass back."""
        x, y = self._data
        parameters = {name.removeprefix("model."): p for name, p in self._parameters().items()}
        found = []
        rows = _ROWS // self._rows * self._rows  # whole parts, as many as pass at once
        with torch.no_grad():
            for at in range(0, self.n, rows):
                some_x, some_y = x[at : at + rows], y[at : at + rows]
                each = [vectors.new_zeros(0, len(some_x), dtype=torch.float64)]
                for some in torch.split(vectors, self._at_once(len(some_x))):
                    lines = {
                        name.removeprefix("model."): part
                        for name, part in self._split(some).items()
                    }
                    each.append(
                        taylor.forms(
                            self._whole.model, self._whole.loss, some_x, some_y, lines, parameters
                        )
                    )
                found += [
                    part.mean(dim=1) for part in torch.split(torch.cat(each), self._rows, dim=1)
                ]
        return torch.stack(found)

    def trace(self, probes: Tensor, of: int | None = None) -> Estimate:
        """Tr H by Hutchinson, from these random signs.  # probes: [probe, parameter]

        The standard error is that of the probes; at least two are needed for one, else it is
        infinite. Where the samples were drawn from so many (`of`), it has their share too, by the
        differences between parts.
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
        """Tr H by as many products as there are parameters: for small models."""
        size, total = self.layout.size, 0.0
        for first in range(0, size, 256):
            units = torch.zeros(min(256, size - first), size)
            units[torch.arange(len(units)), first + torch.arange(len(units))] = 1.0
            total += (
                float((self.sizes.to(self.layout.blank.device) @ self.forms(units)).sum()) / self.n
            )
        return total

    def extremes(self) -> tuple[float, float]:
        """(λ_min, λ_max) of H, each to about four digits of the larger of them."""
        return extremes(self.products, self.layout.size)

    # --- inside ---

    def _parameters(self) -> dict[str, Tensor]:
        """As they stand."""
        model = self._whole.model
        return {
            f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad
        }

    def _parts(
        self, size: int | None = None
    ) -> Iterator[tuple[Callable[[dict[str, Tensor]], Tensor], int]]:
        """The summed loss of each part as a function of the parameters, and how many samples it
        has.
        """
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
        """Σ_i H_i v for each v.  # [vector, parameter]"""
        with _without_dropout(self._whole.model):
            try:
                return self._product(total, self._parameters(), self._split(vectors))
            except (NotImplementedError, RuntimeError):
                if self._product is _reverse_over_reverse:
                    raise
            # an operation without a derivative in forward mode (recurrent ones)
            self._product = _reverse_over_reverse
            return self._product(total, self._parameters(), self._split(vectors))

    def _split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Vectors by the names of the parameters.  # name -> [vector, *parameter]"""
        layout = self.layout
        pieces = torch.split(vectors, list(layout.sizes), dim=1)
        named = zip(layout.names, layout.shapes, pieces, strict=True)
        return {f"model.{name}": piece.reshape(-1, *shape) for name, shape, piece in named}

    def _flat(self, found: dict[str, Tensor]) -> Tensor:
        return torch.cat(
            [found[f"model.{name}"].reshape(-1) for name in self.layout.names]
        ).double()


def extremes(products: Callable[[Tensor], Tensor], size: int) -> tuple[float, float]:
    """(λ_min, λ_max) of a symmetric matrix that is known by its products, [vector, number] ->
    [vector, number].
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
    # The other end, as the far end of the matrix moved by the first: as accurate relative to it,
    # and as quick to find.
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
    """The derivative of the gradient along every vector, all at once."""

    def along(vector: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = jvp(grad(total), (parameters,), (vector,))[1]
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`torch.jit", DeprecationWarning
        )  # torch's own, the first time
        found = vmap(along)(vectors)
    return torch.cat([found[name].flatten(1) for name in vectors], dim=1)


def _reverse_over_reverse(
    total: Total, parameters: dict[str, Tensor], vectors: dict[str, Tensor]
) -> Tensor:
    """The gradient of ⟨gradient, v⟩, vector by vector."""
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
            rows.append(torch.cat([part.reshape(-1) for part in filled]))
    return torch.stack(rows).detach()


@contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Without libraries whose recurrent layers, or attention, cannot be differentiated twice."""
    with (
        torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        torch.backends.cudnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """With every rate of dropout at 0; not in evaluation mode, in which some layers take another
    road.
    """
    rates = {
        nn.modules.dropout._DropoutNd: "p",
        nn.MultiheadAttention: "dropout",
        nn.RNNBase: "dropout",
    }
    found = [
        (m, name, getattr(m, name))
        for m in model.modules()
        for kind, name in rates.items()
        if isinstance(m, kind)
    ]
    try:
        for module, name, _ in found:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in found:
            setattr(module, name, rate)


def _kept(whole: nn.Module, one: Any) -> int:
    """Numbers that autograd keeps for one sample's backward pass, parameters left out."""
    own, numbers = {p.untyped_storage().data_ptr() for p in whole.parameters()}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal numbers
        numbers += 0 if tensor.untyped_storage().data_ptr() in own else tensor.numel()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        whole(*one)
    return max(
        numbers, sum(leaf.numel() for leaf in tree_leaves(one) if isinstance(leaf, Tensor)), 1
    )


def _one(value: Any) -> Any:
    """The first sample of a tensor."""
    return value[:1] if isinstance(value, Tensor) else value
