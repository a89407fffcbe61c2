"""Tests of `evenclip epsilon`: its output and its error messages."""

import json
import subprocess
import sys

import pytest

from evenclip.cli import main, version
from evenclip.mechanism.accounting import epsilon
from evenclip.mechanism.calibration import scale_for
from evenclip.mechanism.release import Entry, Ledger

ADULT = ["epsilon", "--rate", str(1 / 92), "--steps", "1840", "--delta", "1e-6"]


def run(capsys, *arguments):
    """Run the command line; return (exit status, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main([*arguments])
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def test_both_figures_in_words(capsys):
    status, out, err = run(capsys, *ADULT, "--sigma", "1")
    assert (status, err) == (0, "")
    assert "ε        3.104 by PLD, 3.408 by RDP, at δ = 1e-06" in out
    assert "one record, added or removed; batches drawn by Poisson sampling" in out


def test_the_count_is_accounted_on_the_same_batch(capsys):
    _, out, _ = run(capsys, *ADULT, "--sigma", "1", "--sigma-count", "10")
    assert "σ = 1, σ_count = 10; joint: 0.995037" in out
    assert "3.444 by RDP" in out


def test_json_has_every_number(capsys):
    status, out, _ = run(capsys, *ADULT, "--sigma", "1", "--sigma-count", "10", "--json")
    facts = json.loads(out)
    assert status == 0
    assert set(facts) == {
        "rdp",
        "pld",
        "sigma",
        "sigma_count",
        "joint_multiplier",
        "parameters",
        "rate",
        "steps",
        "delta",
    }
    assert facts["rdp"] == pytest.approx(3.444, abs=0.002)
    assert facts["pld"] == pytest.approx(3.135, abs=0.002)
    assert facts["joint_multiplier"] == pytest.approx((1 + 0.01) ** -0.5)
    assert (facts["sigma"], facts["sigma_count"], facts["steps"], facts["delta"]) == (
        1.0,
        10.0,
        1840,
        1e-6,
    )


@pytest.mark.parametrize("sigma_count", [None, 10.0])
def test_with_the_number_of_parameters_epsilon_is_that_of_the_drawn_noise(capsys, sigma_count):
    count = [] if sigma_count is None else ["--sigma-count", str(sigma_count)]
    options = [*ADULT, *count, "--json"]
    _, ideal, _ = run(capsys, *options, "--sigma", "1")
    _, drawn, _ = run(capsys, *options, "--sigma", "1", "--parameters", "100000000")
    for name in ("pld", "rdp"):
        assert 1e-4 < json.loads(drawn)[name] - json.loads(ideal)[name] < 1e-2
    target = ["--target-epsilon", "3", "--parameters", str(10**11)]
    _, found, _ = run(capsys, *options, *target)
    facts = json.loads(found)
    assert 0.9995 * 3 <= facts["pld"] <= 3
    assert facts["parameters"] == 10**11


def test_json_says_null_where_there_is_no_count(capsys):
    _, out, _ = run(capsys, *ADULT, "--sigma", "1", "--json")
    assert json.loads(out)["sigma_count"] is None


def test_the_curve_falls_with_delta_and_fits_the_terminal(capsys):
    _, out, _ = run(capsys, *ADULT, "--sigma", "1", "--sigma-count", "10", "--curve")
    assert all(len(line) <= 80 for line in out.splitlines())
    _, out, _ = run(capsys, *ADULT, "--sigma", "1", "--curve", "--json")
    rows = json.loads(out)["curve"]
    assert [row["delta"] for row in rows] == pytest.approx(
        [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]
    )
    for column in ("rdp", "pld"):
        values = [row[column] for row in rows]
        assert values == sorted(values, reverse=True)


def test_the_curve_leaves_out_what_is_not_a_delta(capsys):
    _, out, _ = run(
        capsys,
        "epsilon",
        "--rate",
        "1",
        "--steps",
        "1",
        "--delta",
        "0.01",
        "--sigma",
        "2",
        "--curve",
        "--json",
    )
    assert [row["delta"] for row in json.loads(out)["curve"]] == pytest.approx(
        [1e-5, 1e-4, 1e-3, 1e-2, 0.1]
    )


@pytest.mark.parametrize("sigma_count", [None, 10.0, 1.1])
def test_the_sigma_that_is_found_costs_the_target(capsys, sigma_count):
    count = [] if sigma_count is None else ["--sigma-count", str(sigma_count)]
    status, out, _ = run(capsys, *ADULT, "--target-epsilon", "3", *count, "--json")
    facts = json.loads(out)
    assert status == 0
    assert 0.9995 * 3 <= facts["pld"] <= 3
    # The printed six digits are the exact value: with them ε is at most the target.
    assert facts["sigma"] == float(f"{facts['sigma']:.6g}")
    assert facts["joint_multiplier"] >= scale_for(
        {"joint": 1.0}, epsilon=3.0, delta=1e-6, q=1 / 92, steps=1840
    )
    multipliers = {"gradient": facts["sigma"]} | (
        {} if sigma_count is None else {"count": sigma_count}
    )
    assert (
        0.9995 * 3 <= epsilon(Ledger([Entry(1 / 92, tuple(multipliers.items()), 1840)]), 1e-6) <= 3
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["epsilon", "--sigma", "1"],
            "--rate, --steps and --delta are needed to compute ε from noise; give all three, or",
        ),
        (
            [*ADULT, "--sigma", "1", "--parameters", "0"],
            "--parameters is 0; it must be a whole number of at least 1.",
        ),
        ([*ADULT], "--sigma or --target-epsilon: neither given; give exactly one of them."),
        (
            [*ADULT, "--sigma", "1", "--target-epsilon", "3"],
            "--sigma or --target-epsilon: both given; give exactly",
        ),
        ([*ADULT, "--sigma", "0"], "--sigma is 0.0; it must be a finite number above 0."),
        ([*ADULT, "--sigma", "nan"], "--sigma is nan; it must be a finite number above 0."),
        (
            [*ADULT, "--sigma", "1", "--sigma-count", "-1"],
            "--sigma-count is -1.0; it must be a finite number above 0.",
        ),
        (
            [*ADULT, "--target-epsilon", "-3"],
            "--target-epsilon is -3.0; it must be a finite number above 0.",
        ),
        (
            [*ADULT, "--sigma", "1", "--rate", "1.5"],
            "--rate is 1.5; it must lie above 0 and at most at 1.",
        ),
        (
            [*ADULT, "--sigma", "1", "--rate", "0"],
            "--rate is 0.0; it must lie above 0 and at most at 1.",
        ),
        (
            [*ADULT, "--sigma", "1", "--steps", "0"],
            "--steps is 0; it must be a whole number of at least 1.",
        ),
        (
            [*ADULT, "--sigma", "1", "--delta", "1"],
            "--delta is 1.0; it must lie above 0 and below 1",
        ),
        (
            [*ADULT, "--sigma", "1", "--delta", "1e-15"],
            "delta is 1e-15; PLD in double precision is a bound only above",
        ),
        (
            [*ADULT, "--target-epsilon", "3", "--sigma-count", "1"],
            "--sigma-count is 1; the count alone costs more than ε = 3. Give more than",
        ),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, sentence):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"evenclip: {sentence}")
    assert err.count("\n") == 1
    assert err.endswith(".\n")


@pytest.mark.parametrize(
    "arguments", [["epsilon", "--sigma", "much"], ["epsilon", "--nonsense"], ["nonsense"]]
)
def test_a_command_that_cannot_be_read_is_no_traceback(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert "Usage: evenclip" in err


def test_no_arguments_print_the_help(capsys):
    _, out, err = run(capsys)
    assert "epsilon" in out + err
    assert "Usage: evenclip" in out + err


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"evenclip {version()}\n", "")


def test_the_process_exits_with_the_status():
    code = "from evenclip.cli import main; main()"
    command = [sys.executable, "-c", code, *ADULT, "--sigma", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "evenclip: --sigma is -1.0; it must be a finite number above 0.\n"


def test_help_does_not_wait_for_torch():
    code = "import sys; from evenclip.cli import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
