"""What a traced step is changed into on a GPU, where libraries are slow: the same products, taken in another way.

a last layer's product      long rows with few columns: in parts, by many blocks of the GPU instead of a few
convolutions of images      large ones with few channels: by our own kernel, forward and back
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

__all__ = ["lower"]

_aten = torch.ops.aten
# Rows of at least this length, with at most so many columns, in parts of this length.
_LONG, _FEW, _PART = 2048, 32, 256
# Convolutions by our own kernel have at most so many channels and at least so many positions.
_CHANNELS, _POSITIONS = 32, 1024


def lower(graph: GraphModule) -> None:
    """Change the graph in place. Its nodes have their shapes with them (`make_fx`)."""
    has_kernels = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA
    if has_kernels:
        importlib.import_module("evenclip.gradients.layers.passes_cuda")
    for node in list(graph.graph.nodes):
        if node.target in (_aten.mm.default, _aten.addmm.default):
            _product(graph.graph, node)
        elif node.target is _aten.convolution.default and has_kernels:
            _forward(graph.graph, node)
        elif node.target is _aten.convolution_backward.default and has_kernels:
            _backward(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


# --- products ---


def _product(graph: Graph, node: Node) -> None:
    a, b = node.args[-2:]
    assert isinstance(b, Node)
    length, columns = b.meta["val"].shape
    if length < _LONG or columns > _FEW or node.kwargs:
        return
    with graph.inserting_before(node):
        found = graph.call_function(in_parts, (a, b))
        if len(node.args) == 3:
            found = graph.call_function(torch.add, (found, node.args[0]))
    node.replace_all_uses_with(found)


def in_parts(a: Tensor, b: Tensor) -> Tensor:
    """The product as the sum of the products of parts.  a: [row, long], b: [long, column]"""
    length, columns = b.shape
    parts = max(count for count in range(1, length // _PART + 1) if length % count == 0)
    rows = a.view(-1, parts, length // parts).transpose(0, 1)
    return torch.bmm(rows, b.mT.view(columns, parts, length // parts).permute(1, 2, 0)).sum(dim=0)


# --- convolutions ---


def _forward(graph: Graph, node: Node) -> None:
    a, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if not _is_ours(a, node, transposed, groups):
        return
    with graph.inserting_before(node):
        found = graph.call_function(torch.ops.evenclip.convolution.default, (a, weight, stride, padding, dilation))
        if bias is not None:
            found = graph.call_function(_with_bias, (found, bias))
    node.replace_all_uses_with(found)


def _backward(graph: Graph, node: Node) -> None:
    given: tuple[Any, ...] = node.args
    delta, a, weight, _, stride, padding, dilation, transposed, _, groups, wanted = given
    is_plain = tuple(wanted) == (True, False, False) and all(s == 1 for s in stride)
    if not is_plain or not _is_ours(delta, a, transposed, groups):
        return
    size = list(a.meta["val"].shape[2:])
    for user in list(node.users):  # the first of what it returns; nobody takes the others
        with graph.inserting_before(user):
            found = graph.call_function(
                torch.ops.evenclip.convolution_back.default, (delta, weight, size, padding, dilation)
            )
        user.replace_all_uses_with(found)


def _with_bias(x: Tensor, bias: Tensor) -> Tensor:
    return x + bias.view(1, -1, 1, 1)


def _is_ours(a: Any, out: Any, transposed: Any, groups: Any) -> bool:
    """Whether the kernel takes it, and does so more quickly: few channels come out at many positions, in all bits."""
    like = a.meta["val"]
    if like.ndim != 4 or like.dtype != torch.float32 or transposed or groups != 1:
        return False
    channels, height, width = out.meta["val"].shape[1:]
    rounded = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return bool(channels <= _CHANNELS and height * width >= _POSITIONS and not rounded)
