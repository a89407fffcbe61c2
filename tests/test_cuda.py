"""On a GPU a run is what it is on the CPU: the same batches, the same noise, the same numbers to rounding."""

import gc
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam

import evenclip
from evenclip import Performance, program
from evenclip import stack as stack_module
from evenclip.models import cnn, mlp
from evenclip.quick import Quick
from evenclip.recording import Reel
from evenclip.stack import Stack
from evenclip.train import prepare

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from evenclip.gradients.layers import passes_cuda  # triton comes with torch for CUDA

GPU, COMPILED = "cuda", Performance(compile=True)
ADAPT = evenclip.DPSGDGlobalAdapt(sigma_count=3.0)
# float32: 20 steps of lr 0.1 along gradients of length about 1, each off by some 1e-6 of it (128 terms in another
# order, logarithms and cosines of another library).
ROUNDING = 1e-5


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
    here, there = images("cpu", evenclip.DPSGD()), images("cuda", evenclip.DPSGD())
    assert torch.allclose(parameters(here), parameters(there), atol=ROUNDING)


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


# --- compiled, and recorded as CUDA graphs ----------------------------------------------------------------------------


def table(n=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 98, generator=generator), torch.randint(0, 2, (n,), generator=generator)
    return x, y, torch.randint(0, 2, (n,), generator=generator)


def model(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return mlp(hidden=(32,))


def making(rule, data=None, seed=0, device=GPU, **more):
    """A function that makes this run anew."""
    given = {"batch_size": 128, "steps": 20, "lr": 0.1, "seed": seed, "device": device, **more}
    return partial(prepare, model(seed), table() if data is None else data, rule=rule, **given)


def alone(make):
    run = make()
    with run.listening():
        while run.t < run.settings.steps:
            run.update(run.step())
    return run


def assert_close(one, other, atol=ROUNDING):
    """Two runs: parameters, state and ledger."""
    assert torch.allclose(parameters(one), parameters(other), rtol=0, atol=atol)
    assert one.state.cpu().tolist() == pytest.approx(other.state.cpu().tolist(), rel=1e-5)
    assert one.ledger == other.ledger
    for row, their_row in zip(one.trace.rows, other.trace.rows, strict=True):
        assert row["samples"] == their_row["samples"]
        assert row["loss"] == pytest.approx(their_row["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "rule",
    [evenclip.NonPrivate(), evenclip.DPSGD(), evenclip.DPSGDF(sigma_count=3.0), ADAPT],
    ids=lambda r: r.name,
)
def test_a_compiled_table_on_the_gpu_is_the_table_on_the_cpu(rule):
    here, there = alone(making(rule, device="cpu")), alone(making(rule, performance=COMPILED))
    assert there._quick is not None
    assert_close(here, there)
    assert_close(alone(making(rule)), there)  # eagerly, on the GPU


def test_compiled_images_on_the_gpu_are_images_on_the_cpu():
    """Products are in float32, unless asked otherwise; a convolution has some 500 terms."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(500, 1, 28, 28, generator=generator), torch.randint(0, 10, (500,), generator=generator)
    torch.manual_seed(0)
    make = partial(prepare, cnn(), data, rule=ADAPT, steps=20, batch_size=64, seed=0, lr=0.1)
    here, eager, there = (
        alone(partial(make, device=device, performance=performance))
        for device, performance in (("cpu", None), (GPU, None), (GPU, COMPILED))
    )
    assert there._quick is not None
    assert_close(here, there, 3 * ROUNDING)
    assert_close(eager, there, 3 * ROUNDING)


def test_images_go_through_convolutions_of_our_own(monkeypatch):
    """In a compiled step, unless operands of fewer bits are allowed; and it is the quicker graph that was taken."""
    counted, launch = [], passes_cuda.windows_times
    monkeypatch.setattr(passes_cuda, "windows_times", lambda *a, **k: (counted.append(k["tanh"]), launch(*a, **k)))
    monkeypatch.setattr(program, "_GRAPHS", {})
    generator = torch.Generator().manual_seed(1)
    data = torch.rand(300, 3, 32, 32, generator=generator), torch.randint(0, 2, (300,), generator=generator)
    make = partial(prepare, cnn(3, 32, 2), data, rule=ADAPT, steps=3, batch_size=64, seed=0, lr=0.1, device=GPU)
    quick = alone(partial(make, performance=COMPILED))
    assert {True, False} == {*counted}
    assert 2 * counted.count(False) == counted.count(True) > 0
    counted.clear()
    alone(partial(make, performance=Performance(compile=True, tf32=True)))
    assert counted == []
    assert_close(alone(make), quick, 3 * ROUNDING)


def test_batches_of_every_size():
    """From none to many: each size has its own recording, and the smallest none."""
    for more in ({"q": 0.0005, "batch_size": 1, "steps": 40}, {"q": 0.06, "batch_size": 2}):
        here, there = (
            alone(making(ADAPT, device=d, **more, performance=p)) for d, p in (("cpu", None), (GPU, COMPILED))
        )
        assert_close(here, there, 1e-3)  # sums are divided by 1 or 2 instead of 128: steps are that much longer


@pytest.mark.parametrize(
    "optimizer",
    [partial(SGD, momentum=0.9), Adam, lambda parameters, lr: SGD(parameters, lr=lr)],
    ids=["momentum", "Adam", "parameters one by one"],
)
def test_every_optimiser_moves_the_parameters_that_the_graph_reads(optimizer):
    more = {"optimizer": optimizer, "lr": 0.05}
    here, there = alone(making(ADAPT, device="cpu", **more)), alone(making(ADAPT, performance=COMPILED, **more))
    assert_close(here, there, 1e-3 if optimizer is Adam else 3 * ROUNDING)  # Adam: a gradient near 0 has any sign


def test_a_compiled_run_is_resumed_where_it_was(tmp_path):
    data = table()
    given = {"rule": ADAPT, "steps": 20, "batch_size": 128, "seed": 0, "lr": 0.1, "device": GPU}
    given |= {"performance": COMPILED}
    whole = evenclip.fit(model(), data, **given)

    def stop(step):
        if step.t == 7:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        evenclip.fit(model(), data, **given, checkpoint=tmp_path, checkpoint_every=5, observers=[stop])
    resumed = evenclip.fit(model(), data, **given, checkpoint=tmp_path, checkpoint_every=5, resume=True)
    assert torch.allclose(parameters(whole), parameters(resumed), rtol=0, atol=1e-6)
    assert whole.ledger == resumed.ledger
    assert whole.state.tolist() == pytest.approx(resumed.state.tolist(), rel=1e-6)


def test_looking_changes_nothing_on_the_gpu():
    """What an observer holds on to is not overwritten by the next replay."""
    seen = []
    given = {"rule": ADAPT, "steps": 6, "batch_size": 128, "seed": 0, "device": GPU, "performance": COMPILED}

    def look(step):
        ones = torch.ones(len(step.losses), dtype=torch.float64, device=GPU)
        seen.append((step, step.norms.clone(), step.public.gradient.clone(), step.weighted_sum(ones)))

    plain, watched = evenclip.fit(model(), table(), **given), evenclip.fit(model(), table(), **given, observers=[look])
    assert torch.allclose(parameters(plain), parameters(watched), rtol=0, atol=1e-6)
    assert len(seen) == 6
    for step, norms, gradient, _ in seen:
        assert torch.equal(step.norms, norms)
        assert torch.equal(step.public.gradient, gradient)


# --- noise ------------------------------------------------------------------------------------------------------------


def alike(rows) -> bool:
    """Whether two of these rows of noise are the same, up to sign and rounding. Thousands of numbers each."""
    unit = rows / rows.norm(dim=1, keepdim=True)
    return bool(((unit @ unit.T).abs().fill_diagonal_(0.0) > 0.5).any())


RULE = evenclip.DPSGD(C0=0.5, sigma=1.3)


def replayed(steps=8):
    """The run, and (g̃·B − Σ γ_i g_i)/(σS) of each of its steps.  # [step, parameter]"""
    run, rows = making(RULE, performance=COMPILED, steps=steps)(), []
    with run.listening():
        assert run._quick is not None
        while run.t < steps:
            found = run.step()
            rows.append((found.public.gradient * found.B - found.clipped_sum).double() / (0.5 * 1.3))
            run.update(found)
    return run, torch.stack(rows).cpu()


def test_every_replay_has_noise_of_its_own_and_that_of_the_cpu():
    run, rows = replayed()
    assert not alike(rows)
    own = torch.stack([run.noise.of(t)["gradient"].cpu().double() for t in range(8)])
    torch.testing.assert_close(rows, own, rtol=1e-3, atol=1e-3)  # a small difference of larger float32 numbers


def hold(monkeypatch):
    """The fault: the number of the step that the recorded graph reads is never moved on."""
    call, one = Quick.__call__, Reel._one
    monkeypatch.setattr(Quick, "__call__", lambda self, t, *given: call(self, 0 * t, *given))

    def uncounted(self, rows):
        found = one(self, rows)
        self._clock[0].sub_(1)
        return found

    monkeypatch.setattr(Reel, "_one", uncounted)


def test_a_step_that_is_not_counted_in_the_graph_would_be_seen(monkeypatch):
    hold(monkeypatch)
    assert alike(replayed()[1])


@pytest.fixture
def columns(monkeypatch):
    """What every step of a stack computed: [step][kind], columns of [run, ...]."""
    seen, call = [], Reel.step

    def watched(self, rows):
        call(self, rows)
        seen.append([type(of)(*(column.clone() for column in of)) for of in self.last])

    monkeypatch.setattr(Reel, "step", watched)
    return seen


def stacked(makes, compile=True, same_key=False):
    """The runs of a stack, trained, in the order given."""
    runs = [make() for make in makes]
    if same_key:
        for run in runs:
            run.noise.set_state(runs[0].noise.state())
    stack = Stack(runs, compile=compile)
    with stack.listening():
        while stack.t < stack.steps:
            stack.step()
    return runs


def added(columns):
    """What was added for every run and step of one rule.  # [step · run, parameter]"""
    rows = [(of.gradient * 128.0 - of.clipped_sum).double() / (0.5 * 1.3) for (of,) in columns]
    return torch.cat(rows).cpu()


def test_every_run_of_a_stack_and_every_step_has_noise_of_its_own(columns):
    stacked([making(RULE, table(), seed, steps=6) for seed in range(3)])
    rows = added(columns)
    assert len(rows) == 18
    assert not alike(rows)
    assert 0.98 < float(rows.std()) < 1.02


def test_a_key_that_two_runs_share_would_be_seen(columns):
    stacked([making(RULE, table(), seed, steps=6) for seed in range(3)], same_key=True)
    assert alike(added(columns))


def test_a_step_that_a_stack_does_not_count_would_be_seen(columns, monkeypatch):
    hold(monkeypatch)
    stacked([making(RULE, table(), seed, steps=6) for seed in range(3)])
    assert alike(added(columns))


# --- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True], ids=["traced", "compiled"])
def test_a_run_in_a_stack_on_the_gpu_is_the_run_alone(compile):
    """Recording a graph takes steps to try it out, which must leave neither parameters nor Z where they led."""
    rules = (ADAPT, evenclip.DPSGDF(sigma_count=3.0), evenclip.DPSGD(), evenclip.NonPrivate())
    makes = [making(rule, table(seed=seed), seed, lr=0.1 + 0.1 * seed) for rule in rules for seed in (0, 1)]
    for make, run in zip(makes, stacked(makes, compile), strict=True):
        assert_close(alone(make), run, 3 * ROUNDING)
        assert_close(alone(partial(make, device="cpu")), run, 3 * ROUNDING)


@pytest.mark.parametrize("runs", [1, 2])
def test_steps_that_are_recorded_ahead_are_not_taken(runs):
    makes = [making(ADAPT, table(seed=seed), seed) for seed in range(runs)]
    stack = Stack([make() for make in makes], compile=False)
    assert stack._feeder.reel._recorded
    with stack.listening():
        while stack.t < stack.steps:
            stack.step()
    for make, run in zip(makes, stack.runs, strict=True):
        assert_close(alone(make), run, 3 * ROUNDING)


def test_recordings_of_many_sizes_need_the_memory_of_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(2000, 1, 28, 28, generator=generator), torch.randint(0, 10, (2000,), generator=generator)
    run = prepare(cnn(), data, rule=ADAPT, steps=60, batch_size=256, seed=0, lr=0.1, device=GPU, performance=COMPILED)
    likely = sorted(stack_module._likely(run), reverse=True)
    monkeypatch.setattr(stack_module, "_likely", lambda run: ())
    stack = Stack([run], compile=True)
    reel, before = stack._feeder.reel, torch.cuda.memory_reserved()
    with stack._on():
        reel.recorded(304)
        one = torch.cuda.memory_reserved()
        for rows in likely:
            reel.recorded(stack._engine.rows(rows))
    assert len(reel._recorded) > 8
    assert one - before < 16 * 2**20, "what compiled code was tried out in is not what it is recorded in"
    assert torch.cuda.memory_reserved() - one < 16 * 2**20, "every size has memory of its own"


def test_who_is_gone_leaves_the_stream_to_the_next():
    """Libraries keep a workspace for each stream that they were used on."""
    used = set()
    for seed in range(3):
        stack = Stack([making(ADAPT, table(), seed)()], compile=False)
        with stack.listening():
            stack.step()
        used.add(stack._recorder.stream.cuda_stream)
        del stack
        gc.collect()
    assert len(used) == 1
    one, other = (Stack([making(ADAPT, table(), seed)()], compile=False) for seed in range(2))
    assert one._recorder.stream != other._recorder.stream


def test_batches_larger_than_the_room_on_the_gpu():
    """Each size is recorded when it first comes, in the middle of training: a trial must not be taken for a step."""
    makes = [making(ADAPT, table(seed=seed), seed, q=0.03, batch_size=8) for seed in (0, 1)]
    for make, run in zip(makes, stacked(makes), strict=True):
        assert_close(alone(partial(make, device="cpu")), run, 1e-3)  # divided by 8: steps are longer


def test_blocks_of_a_few_steps_are_one_run(monkeypatch):
    """What a block led to is told when the next has ended, and the last at the end."""
    whole = stacked([making(ADAPT, table(seed=seed), seed) for seed in (0, 1)])
    monkeypatch.setattr(stack_module, "_AT_ONCE", 3)
    for one, other in zip(whole, stacked([making(ADAPT, table(seed=seed), seed) for seed in (0, 1)]), strict=True):
        assert_close(one, other, 1e-6)
        assert other.sampler.state()["at"] == one.sampler.state()["at"]


def test_runs_that_take_turns_are_computed_at_the_same_time_and_do_not_disturb_each_other():
    """Each on a stream of its own, with memory of its own: over many steps two kernels that shared any would show."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(2000, 1, 28, 28, generator=generator), torch.randint(0, 10, (2000,), generator=generator)
    makes = [
        partial(prepare, cnn(seed=seed), data, rule=ADAPT, steps=60, batch_size=128, seed=seed, lr=0.1, device=GPU)
        for seed in range(4)
    ]
    runs = [make() for make in makes]
    with ExitStack() as ears:
        stacks = [ears.enter_context(Stack([run], compile=True).listening()) for run in runs]
        for _ in range(60):
            for stack in stacks:
                stack.step()
    for make, run in zip(makes, runs, strict=True):
        (other,) = stacked([make])
        assert torch.equal(parameters(run), parameters(other))
        assert run.ledger == other.ledger
        assert run.trace.rows == other.trace.rows


# --- eleven bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_tf32_on_request_has_norms_that_are_no_shorter_than_what_is_summed(compile):
    """Weights are C/norm: were a norm too short, its gradient would be clipped to more than C."""
    exact, rough = (
        making(evenclip.DPSGD(C0=0.1), performance=Performance(compile=compile, tf32=tf32)) for tf32 in (False, True)
    )
    runs, steps, lengths = [make() for make in (exact, rough)], [], []
    for run in runs:
        with run.listening():
            found = run.step()
            chosen = torch.eye(len(found.losses), dtype=torch.float64, device=GPU)[:24]
            steps.append(found)
            lengths.append(torch.stack([found.weighted_sum(one).double().norm() for one in chosen]))
            run.update(found)
    for found, length in zip(steps, lengths, strict=True):
        assert bool((found.norms[:24].double() >= length).all())
    allowance = 2.0**-6  # products of operands of 11 bits, layer upon layer, forwards and back
    assert bool((steps[1].norms >= steps[0].norms * (1 - allowance)).all())
    assert bool((steps[1].norms <= steps[0].norms * (1 + 4 * allowance)).all())
    assert torch.allclose(parameters(alone(exact)), parameters(alone(rough)), rtol=0, atol=1e-2)
    assert not torch.equal(steps[0].norms, steps[1].norms)  # it was heard
