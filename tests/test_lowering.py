"""A step that was changed for a GPU computes what it computed before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from evenclip import lowering


@pytest.mark.parametrize("bias", [True, False])
def test_long_products_with_few_columns_are_taken_in_parts(bias):
    layer = nn.Linear(2304, 5, bias=bias)
    inputs = [torch.randn(7, 2304), *layer.parameters()]

    def act(x, *parameters):
        return F.linear(x, *parameters), x.T @ x[:, :64]  # the second has too many columns

    graph = make_fx(act)(*inputs)
    lowering.lower(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(lowering.in_parts) == 1
    assert torch.ops.aten.addmm.default not in targets
    assert torch.ops.aten.mm.default in targets
    for found, expected in zip(graph(*inputs), act(*inputs), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
