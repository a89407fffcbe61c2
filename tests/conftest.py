"""Use one thread per test process and fixed hypothesis examples; list skipped tests by reason."""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # the folder of `pages`
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and the processes that tests interrupt
    # would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "evenclip",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)
settings.load_profile("evenclip")


class Here:
    """An executor that carries out runs in this process, for tests that are not about processes."""

    def check_device(self, device):
        pass

    def carry_out(self, specs, store, show):
        from evenclip.sweep.work import work

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in a worker
            for spec in specs:
                store.write(spec, *work(spec, lambda t: None))
        return []

    def map_processes(self, work, items):
        return ((place, work(item)) for place, item in enumerate(items))


@pytest.fixture(scope="session")
def here():
    return Here()


@pytest.fixture
def no_processes(monkeypatch, here):
    """Carry out the runs of commands in this process; `sweep/` tests the processes."""
    monkeypatch.setattr("evenclip.sweep.Local.carry_out", lambda _, *given: here.carry_out(*given))


@pytest.fixture(scope="session", autouse=True)
def same_seeds_everywhere():
    """Derive keys alike after a change of the package's sources, and on any processor.

    Otherwise a test that trains from a seed would draw other noise on every machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenclip.training.keys.sources", lambda: "the sources")
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "any")
        yield


@pytest.fixture
def one_stream(monkeypatch):
    """Derive keys from the seed alone, so that runs that should compute alike also draw alike.

    Otherwise everything that may change a sum changes the noise; `training/test_keys.py` tests
    that.
    """
    monkeypatch.setattr("evenclip.training.run.conditions", lambda *given: {})


MOST_REASONS = 9  # number of listed reasons; one more line has the number of the others


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped for each reason, most frequent first."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if not reasons:
        return
    terminalreporter.write_sep("=", "skipped")
    for reason, count in reasons.most_common(MOST_REASONS):
        terminalreporter.write_line(f"{count:4} {reason}")
    if len(reasons) > MOST_REASONS:
        rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(MOST_REASONS))
        terminalreporter.write_line(
            f"{rest:4} for {len(reasons) - MOST_REASONS} other reasons; see `pytest -rs`"
        )
