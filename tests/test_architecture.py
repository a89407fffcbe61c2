"""Imports point down the tree, importing costs little, and training needs torch and numpy only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evenclip
from evenclip.rules import RULES
from fresh import fresh

ROOT = Path(evenclip.__file__).parent

# From the top: a room may import the rooms on later lines, and nothing else of the package.
ORDER = [
    ["__main__"],
    ["cli"],
    ["reproduction", "sklearn", "opacus", "export"],
    ["comparison"],
    ["report"],
    ["sweep"],
    ["audit", "distributed"],
    ["training"],
    ["mechanism"],
    ["rules"],
    ["gradients", "data", "models"],
    ["files"],
    ["check", "devices", "terminal"],
    ["arguments"],
]
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
HEAVY = ["matplotlib", "pandas", "scipy", "dp_accounting", "typer", "rich", "sklearn", "pyarrow"]


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room of a file: its folder, or the file itself at the top."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of every import, also in functions, but not in TYPE_CHECKING."""
    names = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from evenclip import check` imports a room, `from evenclip.rules import Rule` a
            # name in one
            names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return names


def imported(path: Path) -> list[tuple[int, str]]:
    """Return (line, room) of every import from the package."""
    return [
        (line, name.split(".")[1])
        for line, name in imports_of(path)
        if name.startswith("evenclip.")
    ]


def statements(tree: ast.AST):
    """Yield all nodes outside of `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (inner for branch in node.orelse for inner in [branch, *statements(branch)])
            continue
        yield node
        yield from statements(node)


def test_every_part_has_its_place():
    parts = {room_of(path) for path in modules()} - {"__init__"}
    assert parts == set(LEVEL), "a new room of the package needs a line in ORDER"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    here = room_of(path)
    wrong = [
        f"{path}:{line}: {here} imports {part}"
        for line, part in imported(path)
        if here != "__init__" and part != here and LEVEL.get(part, -1) <= LEVEL[here]
    ]
    assert not wrong


def test_the_search_for_imports_finds_them(tmp_path):
    """The test above depends on this; the file has every kind of import."""
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import evenclip.training.step\n"
        "from evenclip import check, models\n"
        "from evenclip.rules.rule import Rule\n"
        "if TYPE_CHECKING:\n"
        "    from evenclip.training.fit import Result\n"
        "else:\n"
        "    from evenclip.data import Dataset\n"
        "def later():\n"
        "    from evenclip.training.run import Run\n"
    )
    expected = [
        (2, "training"),
        (3, "check"),
        (3, "models"),
        (4, "rules"),
        (8, "data"),
        (10, "training"),
    ]
    assert imported(path) == expected


def module_name(path: Path) -> str:
    parts = ["evenclip", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules in a cycle or leading to one, by removing leaves until none is left."""
    left = {module: set(needs) for module, needs in graph.items()}
    while leaves := {module for module, needs in left.items() if not needs}:
        left = {module: needs - leaves for module, needs in left.items() if module not in leaves}
    return sorted(left)


def test_no_module_imports_itself_in_a_circle():
    """Imports in functions count too."""
    names = {module_name(path): path for path in modules() if path != ROOT / "__init__.py"}
    graph = {}
    for name, path in names.items():
        needed = {
            full if full in names else full.rpartition(".")[0] for _, full in imports_of(path)
        }
        graph[name] = (needed & set(names)) - {name}
    assert cycles(graph) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


def test_there_are_no_utils():
    assert not [
        path for path in modules() if path.stem in ("utils", "util", "helpers", "common", "misc")
    ]
    assert not [path for path in ROOT.rglob("utils") if path.is_dir()]


def run(code: str) -> str:
    """Run code in a new Python process; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}


def test_importing_the_package_is_quick_and_imports_nothing_heavy():
    """The time excludes torch and includes everything that `fit` needs."""
    printed = fresh(
        "import sys, time, torch, torch.optim\n"
        "start = time.process_time()\n"
        "import evenclip\n"
        "evenclip.fit, evenclip.DPSGD\n"
        f"print(time.process_time() - start, *[name for name in {HEAVY} if name in sys.modules])"
    )
    seconds, *heavy = printed.split()
    assert heavy == []
    assert float(seconds) < 1.0


def test_importing_the_package_alone_does_not_even_import_torch():
    assert (
        run("import sys, evenclip; print('torch' in sys.modules, 'numpy' in sys.modules)")
        == "False False\n"
    )


def test_every_public_name_is_there():
    for name in evenclip.__all__:
        assert getattr(evenclip, name) is not None
    assert sorted(evenclip.__all__) == sorted(dir(evenclip))
    with pytest.raises(AttributeError, match="module 'evenclip' has no attribute 'nothing'"):
        evenclip.nothing  # noqa: B018


def test_training_needs_torch_and_numpy_only():
    """Train with every rule, a checkpoint and an observer, while heavy imports fail."""
    printed = fresh(
        "import sys, tempfile\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"
        "import torch, evenclip\n"
        "x, y = torch.randn(20, 3), torch.randint(2, (20,))\n"
        "from evenclip.rules import RULES\n"
        "for rule in RULES.values():\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        result = evenclip.fit(torch.nn.Linear(3, 2), (x, y, y), rule=rule(), "
        "batch_size=5,\n"
        "            checkpoint=folder, observers=[lambda step: {'loss': step.losses.sum()}])\n"
        "    print(result.ledger.steps)\n"
    )
    assert printed.split() == ["4"] * len(RULES)


def test_epsilon_without_its_library_says_what_to_install():
    printed = fresh(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"
        "import torch, evenclip\n"
        "data = torch.randn(20, 3), torch.randint(2, (20,))\n"
        "result = evenclip.fit(torch.nn.Linear(3, 2), data, rule=evenclip.DPSGD(), batch_size=5)\n"
        "try:\n"
        "    result.epsilon()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert printed.startswith(
        "ε is computed by dp-accounting, which is not installed; run `pip install "
    )
