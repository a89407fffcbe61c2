"""The documentation runs: every block of Python, every command, the notebook; and it has every public name.

A block of a page is run after the blocks before it, in one namespace and one empty folder, as a reader would. A Python
block whose first line is a comment with the name of a file is written to that file too. Commands that start with
`evenclip` are run with few seeds and epochs. What cannot be run in seconds has the reason in a comment before it,

    <!-- not run: the reason -->

and is compiled or parsed all the same.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import typer

import evenclip
from evenclip import logs, opacus, sklearn
from evenclip.cli import app, main
from evenclip.gradients import per_sample_gradients
from evenclip.rules import Guarded, Rule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)\s*$", re.M | re.S)
REASON = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
SHELL = ("sh", "console", "bash")
# How many blocks are not run. One more needs a reason on its page, and a look at this line.
NOT_RUN = {"python": 0, "shell": 9}
# So that a command takes seconds; the last of two options counts.
QUICK = {
    "compare": ["--seeds", "1", "--epochs", "1", "--lr", "0.1", "--workers", "1"],
    "train": ["--epochs", "1"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a shell block, as words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = REASON.search(before)
        line = before.count("\n") + 2  # of the block's first line
        found.append(Block(page, line, match["language"], match["text"], reason and reason[1]))
    return found


def every_block() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def names(path: Path) -> str:
    return path.stem


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENCLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run_page(page: Path, folder: Path) -> types.ModuleType:
    """All blocks of a page, in their order; its namespace."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        for block in blocks(page):
            if block.language == "python":
                run_python(block, folder, module)
            elif block.language in SHELL:
                run_commands(block)
    finally:
        del sys.modules[module.__name__]
    return module


def run_python(block: Block, folder: Path, module: types.ModuleType) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
    file = re.match(r"# ([\w/]+\.py)\n", block.text)
    if file:
        (folder / file[1]).write_text(block.text, encoding="utf-8")
    if block.reason is None:
        exec(code, module.__dict__)


def run_commands(block: Block) -> None:
    for words in block.commands:
        if words[0] == "evenclip":
            parse(words[1:])
            if block.reason is None:
                run_command(words[1:])
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
        elif words[0].endswith("python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


def parse(words: list[str]) -> None:
    """Raise for a command that `evenclip` would not understand."""
    command, context = typer.main.get_command(app), None
    while True:
        context = command.make_context(command.name or "evenclip", list(words), parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return
        _, command, words = command.resolve_command(context, rest)


def run_command(words: list[str]) -> None:
    quick = QUICK.get(words[0], [])
    if words[0] == "compare" and "--rules" not in words:
        quick = [*quick, "--rules", "dpsgd-global-adapt"]
    with pytest.raises(SystemExit) as end:
        main([*words, *quick])
    assert not end.value.code, f"evenclip {shlex.join(words)} ended with status {end.value.code}"


@pytest.mark.parametrize("page", PAGES, ids=names)
@pytest.mark.filterwarnings("ignore:delta is")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")  # this and the next are Opacus's own
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
    assert len(python) + len(shell) == len(left_out), "a comment stands before a block that is never run"


def test_every_block_says_what_it_is():
    """So that none is passed over because nobody said that it is Python."""
    known = {"python", *SHELL, "text", "json", "{toctree}", "{eval-rst}"}
    assert not [f"{b.page.name}:{b.line}: {b.language!r}" for b in every_block() if b.language not in known]
    assert sum(block.language == "python" for block in every_block()) > 30


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_to_files_lead_somewhere(page):
    """As a Git host follows them; Sphinx checks those of its own site."""
    linked = re.findall(r"\]\(([^)#\s]+)[^)]*\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    here = [link for link in linked if not re.match(r"[a-z]+:", link)]
    assert not [link for link in here if not (page.parent / link).exists()]


def test_the_step_times_beside_the_neighbours_are_those_of_the_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| one step, Adult's MLP.*$", text, re.M)
    (measured,) = re.findall(r"^\| Adult, MLP 256-256 .*$", text, re.M)
    said = re.findall(r"\d+\.\d+", row)
    assert said == re.findall(r"\d+\.\d+", measured)[-len(said) :]  # the last columns: ours, compiled, Opacus's two


def test_the_picture_of_the_report_is_small():
    assert (ROOT / "docs" / "_static" / "report.png").stat().st_size < 250_000


def test_a_mistake_in_a_page_is_found(tmp_path, folder):
    """What the tests above lean on."""
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, folder)
    page.write_text("```sh\nevenclip compare adult --no-such-option\n```\n")
    with pytest.raises(Exception, match="No such option"):
        run_page(page, folder)
    page.write_text("<!-- not run: it would fail -->\n```python\nraise ValueError\n```\n")
    run_page(page, folder)


# The rules of docs/rule.md --------------------------------------------------------------------------------------------


@pytest.fixture
def own_rules(folder):
    """The rules that the page about rules defines."""
    module = types.ModuleType("page_own_rules")
    sys.modules[module.__name__] = module
    for block in blocks(ROOT / "docs" / "rule.md"):
        if block.language == "python" and block.text.startswith("# "):
            run_python(block, folder, module)
    found = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Rule) and c is not Rule]
    yield [rule() for rule in found]
    del sys.modules[module.__name__]


def test_the_rules_of_the_page_never_exceed_their_sensitivity(own_rules):
    """One sample's weighted gradient itself, of random networks on random inputs of every size, at random states."""
    assert [rule.name for rule in own_rules] == ["automatic", "quantile"]
    generator = torch.Generator().manual_seed(0)
    for rule in own_rules:
        for scale in (1e-6, 1e-2, 1.0, 1e2, 1e6):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
            x = scale * torch.randn(40, 5, generator=generator, dtype=torch.float64)
            y, group = torch.randint(3, (40,), generator=generator), torch.randint(2, (40,), generator=generator)
            gradients = per_sample_gradients(model, torch.nn.functional.cross_entropy, x, y)
            state = rule.init(2) * float(torch.rand(1, generator=generator) * 3 + 0.01)
            counts = Guarded(rule).statistics(gradients.norms(), group, state, None)
            now, _ = rule.observe(counts, 40.0, state)
            each = gradients.per_sample()  # [sample, parameter]
            for i, norm in enumerate(gradients.norms()):
                moved = rule.weight(norm, group[i], now) * each[i]
                assert float(moved.norm()) <= float(rule.sensitivity(now))


def test_a_rule_that_is_no_longer_than_a_page_says():
    rule = next(b for b in blocks(ROOT / "docs" / "rule.md") if b.text.startswith("# automatic.py"))
    assert len(rule.text.splitlines()) <= 30


# The notebook ---------------------------------------------------------------------------------------------------------


def test_the_notebook_runs_from_top_to_bottom(folder, capsys):
    """Its cells are Python and nothing else, so no kernel is needed to run them."""
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    namespace: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "This model was trained by dpsgd-global-adapt (sound) and is (ε," in printed


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "package", [evenclip, evenclip.audit, logs, sklearn, opacus], ids=lambda package: package.__name__
)
def test_the_reference_has_every_public_name(package):
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = re.findall(rf"^\.\. auto(?:class|function|exception|data):: {package.__name__}\.(\w+)$", text, re.M)
    assert sorted(documented) == sorted(package.__all__)


# Names that nobody calls: what others are made of or say, and what needs a package that is not a part of this one.
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
    "package", [evenclip, evenclip.audit, logs, sklearn, opacus], ids=lambda package: package.__name__
)
def test_every_public_name_has_an_example_that_is_run(package):
    """In its docstring, or in a block of the reference, which the tests above run."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.S)
    shown = set(re.findall(r"\w+", " ".join(blocks)))
    without = {
        name for name in package.__all__
        if name not in shown and not isinstance(getattr(package, name), types.ModuleType)
        and ">>>" not in _documentation(getattr(package, name))
    }  # fmt: skip
    assert without <= WITHOUT_EXAMPLE


def _documentation(thing):
    """Its docstring and, of a class, those of its methods."""
    methods = vars(thing).values() if isinstance(thing, type) else ()
    return " ".join(str(getattr(part, "__doc__", "")) for part in (thing, *methods))
