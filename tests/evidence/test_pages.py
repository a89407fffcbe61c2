"""Pages and examples that start jobs, ranks or long trainings."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pages import ROOT, run_page


def test_the_page_about_scale_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    run_page(ROOT / "docs" / "scale.md", tmp_path)


@pytest.mark.skipif(
    "EVENCLIP_DATA" not in os.environ, reason="MNIST is not here: EVENCLIP_DATA is not set"
)
def test_the_example_runs_on_a_little_of_mnist():
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "opacus_mnist.py",
            "--epochs",
            "1",
            "--records",
            "600",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    epsilons = re.findall(r"accuracy .* ε (\d+\.\d+)", done.stdout)
    assert len(epsilons) == 2
    assert float(epsilons[0]) == pytest.approx(float(epsilons[1]), abs=0.02)
