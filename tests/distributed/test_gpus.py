"""Ranks on GPUs: nccl where each has one of its own, gloo where they share one."""

from __future__ import annotations

import pytest
import tasks
import torch
from tasks import RULES
from team import Team

GPUS = torch.cuda.device_count()
TEAMS = {"two ranks share one, gloo": (2, "gloo"), "one rank, nccl": (1, None), "two ranks, nccl": (2, None)}


@pytest.fixture(scope="module", params=TEAMS)
def on_gpus(request):
    ranks, backend = TEAMS[request.param]
    needed = ranks if backend is None else 1
    if needed > GPUS:
        pytest.skip(f"needs {needed} GPUs, and there are {GPUS}")
    team = Team(ranks, backend=backend)
    yield team, backend is None
    team.close()


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in pieces"])
def test_ranks_train_the_model_that_one_process_trains_on_the_cpu(on_gpus, name, kind, sharded):
    team, nccl = on_gpus
    if sharded and not nccl:
        pytest.skip("FSDP2 wants a GPU for every rank")
    first, *others = team(tasks.train, RULES[name], kind, sharded=sharded, device="cuda")
    expected = tasks.train(None, RULES[name], kind)
    assert torch.allclose(first["vector"].cpu(), expected["vector"], rtol=1e-6, atol=1e-9)
    assert all(torch.equal(first["vector"].cpu(), other["vector"].cpu()) for other in others)
    assert first["ledger"] == expected["ledger"]
