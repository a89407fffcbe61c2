"""Every planted fault of `tests/planted.py` still fits the code that it is planted into."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from pages import ROOT


def _faults():
    spec = importlib.util.spec_from_file_location("planted", ROOT / "tests" / "planted.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module.FAULTS


FAULTS = _faults()
SOURCES = sorted((ROOT / "src" / "evenclip").rglob("*.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_names_tests_that_exist(fault):
    (path,) = [path for path in SOURCES if str(path).endswith(f"/{fault.file}")]
    assert path.read_text(encoding="utf-8").count(fault.old) == 1, f"{fault.old!r} in {path.name}"
    for test in fault.tests:
        name, _, function = test.partition("::")
        place = ROOT / "tests" / name
        assert place.exists(), f"tests/{name} does not exist"
        defined = f"def {function.split('[')[0].split('::')[-1]}("
        assert not function or defined in place.read_text(encoding="utf-8"), test


def test_names_of_faults_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
