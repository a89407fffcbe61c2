"""Tests of the documentation: its code, its commands and the notebook run, and the reference has
every public name.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import evenclip
from evenclip import opacus, sklearn
from evenclip.gradients import per_sample_gradients
from evenclip.mechanism import Mechanism
from evenclip.rules import Constants, Rule
from evenclip.training import logs
from pages import FENCE, PAGES, ROOT, SHELL, blocks, every_block, run_page, run_python

# Number of blocks that are not run. A further one needs a reason on its page and a change here.
NOT_RUN = {"python": 0, "shell": 9}
# This page starts jobs and ranks, which takes 10 s; tests/evidence runs it.
SLOW = {"scale"}


def names(path: Path) -> str:
    return path.stem


@pytest.fixture
def folder(tmp_path, monkeypatch, no_processes):
    """Work in an empty folder with an empty cache, and without other processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in SLOW], ids=names)
@pytest.mark.filterwarnings("ignore:delta is")
@pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off"
)  # this warning and the next are Opacus's
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:opacus")
def test_a_page_runs_from_top_to_bottom(page, folder):
    run_page(page, folder)


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = [block for block in every_block() if block.reason is not None]
    assert all(len(block.reason) > 10 for block in left_out)
    shell = [block for block in left_out if block.language in SHELL]
    python = [block for block in left_out if block.language == "python"]
    assert {"python": len(python), "shell": len(shell)} == NOT_RUN
    assert len(python) + len(shell) == len(left_out), (
        "a comment stands before a block that is never run"
    )


def test_every_block_says_what_it_is():
    """A block without a language would not be run."""
    known = {"python", *SHELL, "diff", "text", "json", "{toctree}", "{eval-rst}"}
    assert not [
        f"{b.page.name}:{b.line}: {b.language!r}" for b in every_block() if b.language not in known
    ]
    assert sum(block.language == "python" for block in every_block()) > 30


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_to_files_lead_somewhere(page):
    """Links are resolved as a Git host does; Sphinx checks the links of the site."""
    linked = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    here = [link for link in linked if not re.match(r"[a-z]+:", link)]
    assert not [link for link in here if not (page.parent / link).exists()]


def test_the_step_times_beside_the_neighbours_are_those_of_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| one step, Adult's MLP.*$", text, re.M)
    (measured,) = re.findall(r"^\| Adult, MLP 256-256 .*$", text, re.M)
    said = re.findall(r"\d+\.\d+", row)
    assert (
        said == re.findall(r"\d+\.\d+", measured)[-len(said) :]
    )  # the last columns: evenclip, and Opacus in two modes


def test_the_picture_of_the_report_is_small():
    assert (ROOT / "docs" / "_static" / "report.png").stat().st_size < 250_000


def test_a_mistake_in_a_page_is_found(tmp_path, folder):
    """The tests above depend on this."""
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, folder)
    page.write_text("```sh\nevenclip compare adult --no-such-option\n```\n")
    with pytest.raises(Exception, match="No such option"):
        run_page(page, folder)
    page.write_text("<!-- not run: it would fail -->\n```python\nraise ValueError\n```\n")
    run_page(page, folder)


# The rules of docs/rule.md
# --------------------------------------------------------------------------------------------


@pytest.fixture
def rules_of_the_page(folder):
    """Return the rules that docs/rule.md defines."""
    module = types.ModuleType("page_rules")
    sys.modules[module.__name__] = module
    for block in blocks(ROOT / "docs" / "rule.md"):
        if block.language == "python" and block.text.startswith("# "):
            run_python(block, folder, module)
    kinds = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Rule) and c is not Rule
    ]
    yield [rule() for rule in kinds]
    del sys.modules[module.__name__]


def test_the_rules_of_the_page_never_exceed_their_sensitivity(rules_of_the_page):
    """The norm of one sample's weighted gradient is at most S: for random networks, inputs of every
    size, and random states.
    """
    assert [rule.name for rule in rules_of_the_page] == ["automatic", "quantile"]
    generator = torch.Generator().manual_seed(0)
    for rule in rules_of_the_page:
        for scale in (1e-6, 1e-2, 1.0, 1e2, 1e6):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
            ).double()
            x = scale * torch.randn(40, 5, generator=generator, dtype=torch.float64)
            y, group = (
                torch.randint(3, (40,), generator=generator),
                torch.randint(2, (40,), generator=generator),
            )
            gradients = per_sample_gradients(model, torch.nn.functional.cross_entropy, x, y)
            state = rule.init(Constants(groups=2)) * float(
                torch.rand(1, generator=generator) * 3 + 0.01
            )
            counts = Mechanism(rule).count(gradients.norms(), group, state, None)
            now, _ = rule.observe(counts, 40.0, state)
            each = gradients.per_sample()  # [sample, parameter]
            for i, norm in enumerate(gradients.norms()):
                moved = rule.weight(norm, group[i], now) * each[i]
                assert float(moved.norm()) <= float(rule.sensitivity(now))


def test_a_rule_that_is_no_longer_than_a_page_says():
    rule = next(b for b in blocks(ROOT / "docs" / "rule.md") if b.text.startswith("# automatic.py"))
    assert len(rule.text.splitlines()) <= 30


# The notebook
# --------------------------------------------------------------------------------------------------


def test_the_notebook_runs_from_top_to_bottom(folder, capsys):
    """Its cells contain only Python, so they run without a kernel."""
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "This model was trained by dpsgd-global-adapt (sound) and is (ε," in printed


# The reference
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package",
    [evenclip, evenclip.audit, logs, sklearn, opacus],
    ids=lambda package: package.__name__,
)
def test_the_reference_has_every_public_name(package):
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = re.findall(
        rf"^\.\. auto(?:class|function|exception|data):: {package.__name__}\.(\w+)$", text, re.M
    )
    assert sorted(documented) == sorted(package.__all__)


# Names without an example: base classes, messages, and names that need another package.
WITHOUT_EXAMPLE = {
    "NAMES",
    "PRIVATE",
    "Log",
    "EXPECTED_FAILED_CHECKS",
    "TuningWarning",
    "TensorBoard",
    "MLflow",
    "Rule",
}


@pytest.mark.parametrize(
    "package",
    [evenclip, evenclip.audit, logs, sklearn, opacus],
    ids=lambda package: package.__name__,
)
def test_every_public_name_has_an_example_that_is_run(package):
    """The example is in the docstring, or in a block of the reference, which tests above run."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.S
    )
    shown = set(re.findall(r"\w+", " ".join(blocks)))
    without = {
        name for name in package.__all__
        if name not in shown and not isinstance(getattr(package, name), types.ModuleType)
        and ">>>" not in _documentation(getattr(package, name))
    }  # fmt: skip
    assert without <= WITHOUT_EXAMPLE


def _documentation(thing):
    """Return its docstring and, for a class, those of its methods."""
    methods = vars(thing).values() if isinstance(thing, type) else ()
    return " ".join(str(getattr(part, "__doc__", "")) for part in (thing, *methods))
