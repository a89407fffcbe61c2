"""Tests of specifications: what changes the hash of a run."""

from __future__ import annotations

from dataclasses import replace

from evenclip.sweep import spec as module


def test_where_files_are_does_not_matter(spec):
    given = spec()
    moved = replace(
        given, data={**given.data, "path": "/elsewhere"}, rule={**given.rule, "path": "/elsewhere"}
    )
    assert moved.hash == given.hash


def test_a_column_called_path_does(spec):
    given = spec()
    schemas = [{"columns": {"path": {"kind": "number", "range": [0, top]}}} for top in (99, 1000)]
    tables = [
        replace(given, data={"table": True, "options": {"schema": schema}}) for schema in schemas
    ]
    assert tables[0].hash != tables[1].hash


def test_everything_else_does(spec):
    given = spec()
    changes = {
        "lr": 0.2,
        "epochs": 2,
        "batch_size": 21,
        "q": 0.5,
        "delta": 1e-3,
        "seed": 1,
        "device": "cuda",
    }
    changes["tf32"] = True
    others = [replace(given, **{name: value}) for name, value in changes.items()]
    others += [
        replace(given, **{part: {**getattr(given, part), "sha256": "other"}})
        for part in ("data", "model", "rule")
    ]
    others.append(replace(given, data={**given.data, "test": {"path": "/a", "sha256": "b"}}))
    assert len({other.hash for other in (given, *others)}) == len(others) + 1


def test_other_code_has_other_names(spec, monkeypatch):
    before = spec().hash
    monkeypatch.setattr(module, "code", lambda: "other")
    assert spec().hash != before
