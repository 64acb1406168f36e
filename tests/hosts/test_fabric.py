"""Lightning Fabric inside a budget: compiled by shoal.compile, and by torch.compile with options that Fabric copies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.laws import holds_to, loader, network

pytest.importorskip("lightning", reason="lightning is not installed: make test-hosts")


@pytest.mark.parametrize("block", [4, 5], ids=["shoal.compile", "torch.compile"])
def test_it_trains_inside_the_budget_as_plain_pytorch_does(block: int) -> None:
    batches = loader()

    def train(budget: int | None) -> nn.Module:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        page.run(page.block("lightning.md", block), budget, net=net, optimizer=optimizer, batches=batches, nn=nn)
        return net

    holds_to(0.7, train)
