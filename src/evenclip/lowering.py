"""A graph of tensor operations made quicker for a GPU, before it is compiled: the same numbers to rounding.

Sums with zeros, which taps are, are left out. Small convolutions, forward and back and with their tanh, become
operations of our own (`gradients.layers.operations`). Products of long rows with few columns (a last layer) are taken
in parts by many blocks of the GPU: libraries give them to a few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from evenclip.gradients.layers import operations

__all__ = ["lowered"]

aten, ours = torch.ops.aten, torch.ops.evenclip

# Products that are taken in parts: rows of at least this length, at most so many columns, parts of this length.
_LONG, _FEW_COLUMNS, _PART = 2048, 32, 256


def lowered(module: GraphModule, *, exact: bool) -> GraphModule:
    """The quicker graph; the one that is given stays as it is.

    Args:
        module: a graph that was traced: nodes have their values' shapes in `meta`.
        exact: whether operands of convolutions have all their bits.
    """
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    _leave_out_zeros(graph)
    if exact:
        for node in list(graph.nodes):
            if node.target is aten.convolution.default:
                _forward(graph, node)
        for node in list(graph.nodes):
            if node.target is aten.convolution_backward.default:
                _back(graph, node)
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default):
            _in_parts(graph, node)
    graph.eliminate_dead_code()
    graph.lint()
    return GraphModule(module, graph)


def _leave_out_zeros(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(arg, Node) for arg in node.args):
            continue
        args: Any = node.args
        one, other = args
        if other.target is aten.new_zeros.default and _looks(one) == _looks(node):
            _replace(graph, node, one)


def _looks(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.dtype


def _forward(graph: Graph, node: Node) -> None:
    """A convolution, with the tanh after it, if that is all it is for."""
    args: Any = node.args
    a, weight, bias, stride, padding, dilation, *rest = args
    if not _is_small(a, weight, stride, dilation, rest, back=False):
        return
    users = list(node.users)
    tanh = len(users) == 1 and users[0].target is aten.tanh.default
    end = users[0] if tanh else node
    with graph.inserting_before(node):
        turned = graph.call_function(aten.permute.default, (weight, [1, 2, 3, 0]))
        found = graph.call_function(ours.convolved.default, (a, turned, bias, padding, tanh))
    _replace(graph, end, found)
    if tanh:
        graph.erase_node(node)


def _back(graph: Graph, node: Node) -> None:
    """δ through a convolution; if its input was a tanh, through that too, and with the gradients of its weight."""
    args: Any = node.args
    delta, a, weight, _, stride, padding, dilation, *rest, wanted = args
    kernel = weight.meta["val"].shape[2:]
    around = [side - 1 - pad for side, pad in zip(kernel, padding, strict=True)]
    found = next((user for user in node.users if user.args[1] == 0), None)  # others ask for what was not computed
    if wanted != [True, False, False] or found is None or min(around) < 0:
        return
    if not _is_small(delta, weight, stride, dilation, rest, back=True):
        return
    with graph.inserting_before(node):
        flipped = graph.call_function(aten.flip.default, (weight, [2, 3]))
        turned = graph.call_function(aten.permute.default, (flipped, [0, 2, 3, 1]))
    alone = _alone(a, node, found)
    if alone is None:
        with graph.inserting_before(node):
            before = graph.call_function(ours.convolved.default, (delta, turned, None, around, False))
        _replace(graph, found, before)
        return
    tanh, each = alone
    with graph.inserting_before(node):
        gradients = graph.call_function(ours.pulled_back.default, (a, delta, turned, each.args[5]))
    _replace(graph, each, gradients)
    _replace(graph, tanh, a)


def _alone(a: Node, back: Node, found: Node) -> tuple[Node, Node] | None:
    """The derivative of the tanh, and the gradients of the weight, if nobody else needs a after the forward pass."""
    if a.target is not ours.convolved.default or len(found.users) != 1:
        return None
    (tanh,) = found.users
    forward = [user for user in a.users if user.target is ours.convolved.default]
    views = [user for user in a.users if user.target is aten.detach.default]
    if (
        {*a.users} != {*forward, *views, back, tanh}
        or len(forward) != 1
        or tanh.target is not aten.tanh_backward.default
    ):
        return None
    readers = [user for view in views for user in view.users]
    if len(readers) != 1 or readers[0].target is not ours.weight_gradients.default:
        return None
    theirs: Any = back.args
    kernel = list(theirs[2].meta["val"].shape[2:])
    if tanh.args != (found, a) or readers[0].args[1:5] != (theirs[0], kernel, [1, 1], [1, 1]):
        return None
    return tanh, readers[0]


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """One node by another, of the same looks."""
    new.meta.setdefault("val", old.meta["val"])
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _is_small(a: Node, weight: Node, stride: Any, dilation: Any, rest: Any, *, back: bool) -> bool:
    """Whether `convolved` takes it: in two dimensions and float32, every position, all channels with all."""
    looks, shape = a.meta["val"], weight.meta["val"].shape
    if looks.ndim != 4 or looks.dtype != torch.float32 or {*stride, *dilation} != {1} or rest != [False, [0, 0], 1]:
        return False
    inputs, outputs = (shape[0], shape[1]) if back else (shape[1], shape[0])
    return operations.fits(inputs, outputs, (shape[2], shape[3]))


def _in_parts(graph: Graph, node: Node) -> None:
    """A product of long rows with few columns as the sum of the products of parts."""
    args: Any = node.args
    *bias, a, b = args
    length, columns = b.meta["val"].shape
    if length < _LONG or columns > _FEW_COLUMNS or node.kwargs:
        return
    with graph.inserting_before(node):
        found = graph.call_function(_product, (a, b))
        if bias:
            found = graph.call_function(torch.add, (found, bias[0]))
    _replace(graph, node, found)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a: [row, long], b: [long, column]"""
    length, columns = b.shape
    parts = max(count for count in range(1, length // _PART + 1) if length % count == 0)
    rows = a.view(-1, parts, length // parts).transpose(0, 1)
    return torch.bmm(rows, b.mT.view(columns, parts, length // parts).permute(1, 2, 0)).sum(dim=0)
