"""On a GPU a run is what it is on the CPU: the same batches, the same noise, the same numbers to rounding."""

import pytest
import torch

import evenclip
from evenclip import Performance
from evenclip.models import cnn, mlp

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def parameters(result):
    return torch.cat([p.detach().cpu().double().flatten() for p in result.model.parameters()])


def tabular(device, rule, **more):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 98, generator=generator), torch.randint(0, 2, (2000,), generator=generator)
    group = torch.randint(0, 2, (2000,), generator=generator)
    return evenclip.fit(
        mlp(), (x, y, group), rule=rule, steps=20, batch_size=128, seed=0, lr=0.1, device=device, **more
    )


def images(device, rule, **more):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(500, 1, 28, 28, generator=generator), torch.randint(0, 10, (500,), generator=generator)
    return evenclip.fit(cnn(), (x, y), rule=rule, steps=5, batch_size=64, seed=0, lr=0.1, device=device, **more)


@pytest.mark.parametrize(
    "rule",
    [evenclip.NonPrivate(), evenclip.DPSGD(), evenclip.DPSGDF(), evenclip.DPSGDGlobalAdapt()],
    ids=lambda r: r.name,
)
def test_a_table_on_the_gpu_is_the_table_on_the_cpu(rule):
    here, there = tabular("cpu", rule), tabular("cuda", rule)
    assert torch.allclose(parameters(here), parameters(there), atol=1e-5)
    assert here.ledger == there.ledger
    assert here.state.tolist() == pytest.approx(there.state.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    "performance",
    [Performance(chunk=32), Performance(pad=True), Performance(compile=True)],
    ids=["chunk", "pad", "compile"],
)
def test_performance_settings_change_nothing(performance):
    for train in (tabular, images):
        plain = train("cuda", evenclip.DPSGDGlobalAdapt())
        other = train("cuda", evenclip.DPSGDGlobalAdapt(), performance=performance)
        assert torch.allclose(parameters(plain), parameters(other), atol=1e-4)


def test_images_on_the_gpu_are_images_on_the_cpu():
    # cuDNN's convolutions use TF32 unless told otherwise, so the gradients themselves differ by about 1e-3.
    here, there = images("cpu", evenclip.DPSGD()), images("cuda", evenclip.DPSGD())
    assert torch.allclose(parameters(here), parameters(there), atol=1e-3)


def test_resume_on_the_gpu_is_bit_identical(tmp_path):
    torch.use_deterministic_algorithms(True)
    try:
        whole = tabular("cuda", evenclip.DPSGDGlobalAdapt())

        def stop(step):
            if step.t == 7:
                raise RuntimeError("stopped")

        with pytest.raises(RuntimeError, match="stopped"):
            tabular("cuda", evenclip.DPSGDGlobalAdapt(), checkpoint=tmp_path, checkpoint_every=5, observers=[stop])
        resumed = tabular("cuda", evenclip.DPSGDGlobalAdapt(), checkpoint=tmp_path, checkpoint_every=5, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(parameters(whole), parameters(resumed))
    assert whole.ledger == resumed.ledger


def test_a_sample_that_is_not_finite_contributes_nothing_on_the_gpu():
    x = torch.randn(64, 98)
    x[3] = 1e30
    result = evenclip.fit(
        mlp(hidden=(8,)),
        (x, torch.zeros(64, dtype=torch.int64)),
        rule=evenclip.DPSGD(),
        steps=5,
        batch_size=64,
        device="cuda",
    )
    assert torch.isfinite(parameters(result)).all()
