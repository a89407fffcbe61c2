"""Ranks on GPUs: nccl where each has one of its own, gloo where they share one."""

from __future__ import annotations

import pytest
import tasks
import torch
from tasks import RULES
from team import Team

GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def on_gpus(request):
    if (2 if request.param == "nccl" else 1) > GPUS:
        pytest.skip(
            f"{request.param} for two ranks needs {2 if request.param == 'nccl' else 1} GPUs, and there are {GPUS}"
        )
    team = Team(2, backend=None if request.param == "nccl" else "gloo")
    yield team, request.param == "nccl"
    team.close()


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in pieces"])
def test_two_ranks_train_the_model_that_one_process_trains_on_the_cpu(on_gpus, name, kind, sharded):
    team, nccl = on_gpus
    if sharded and not nccl:
        pytest.skip("FSDP2 wants a GPU for every rank")
    first, second = team(tasks.train, RULES[name], kind, sharded=sharded, device="cuda")
    expected = tasks.train(None, RULES[name], kind)
    assert torch.allclose(first["vector"].cpu(), expected["vector"], rtol=1e-6, atol=1e-9)
    assert torch.equal(first["vector"].cpu(), second["vector"].cpu())
    assert first["ledger"] == expected["ledger"]
