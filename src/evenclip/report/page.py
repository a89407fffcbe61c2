"""report.html: a comparison as one self-contained page, without network access or scripts.

It has light, dark and print styles. It is drawn from results.json alone, in this order: answer,
table, charts, privacy statement, methods, settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from evenclip.report import words
from evenclip.report.markup import text, unbroken, wide
from evenclip.report.pictures import pictures
from evenclip.report.statement import statement
from evenclip.report.tables import tables
from evenclip.report.words import display

__all__ = ["NEEDED", "page"]

NEEDED = (
    "dataset",
    "groups",
    "seeds",
    "protocol",
    "privacy",
    "table",
    "settings",
    "course",
    "statement",
)
"""Required keys of results.json."""

WARNING = (
    "The figures by group on this page are measured on test records, and losses, norms and risk "
    "on training records, without noise. They are not differentially private: share them only "
    "with people who may see the records."
)


UNVERIFIED = (
    "These results were not checked against their checksum: they may be damaged or changed since "
    "they were computed. Make the page again without --unverified before you rely on it."
)


def page(results: Mapping[str, Any], *, unverified: bool = False) -> str:
    """Return the page as HTML.

    Args:
        results: the content of results.json.
        unverified: whether to mark the page, because nothing vouches for the results.

    Raises:
        ValueError: the results are not those of a comparison.
    """
    lacking = [name for name in NEEDED if name not in results]
    if lacking:
        raise ValueError(
            f"There is no {lacking[0]!r} in these results; make them again with `evenclip compare "
            "--out`."
        )
    title = f"What privacy costs each group: {results['dataset']}"
    sections = [
        *([_unverified()] if unverified else []),
        _head(results, title),
        tables(results),
        pictures(results),
        statement(results),
        _methods(results),
        _settings(results),
    ]
    style = resources.files("evenclip.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _unverified() -> str:
    return (
        '<aside class="warning" role="alert"><strong>Not verified.</strong> '
        f"{text(UNVERIFIED)}</aside>"
    )


def _head(results: Mapping[str, Any], title: str) -> str:
    first, *more = words.answer(results)
    known = f"{min(results['n_train']):,}" + (
        f" to {max(results['n_train']):,}"
        if min(results["n_train"]) != max(results["n_train"])
        else ""
    )
    model = results.get("model")
    said = "".join(f"<p>{text(sentence)}</p>" for sentence in more)
    not_said = "".join(f"<li>{text(sentence)}</li>" for sentence in words.limits(results))
    return (
        f'<header><p class="what">{text(title)}</p><h1>{unbroken(first)}</h1>{said}'
        f"<p>{words.count(len(results['seeds']), 'seed')}, {known} training records"
        f"{text(f', model {model}' if model else '')}.</p></header>"
        '<aside class="warning" role="note"><strong>Not differentially private.</strong> '
        f"{text(WARNING)}</aside>"
        '<section aria-labelledby="limits"><h2 id="limits">What this does not '
        f"say</h2><ul>{not_said}</ul></section>"
    )


def _methods(results: Mapping[str, Any]) -> str:
    entries = ""
    for rule in results["table"]:
        own = results["statement"].get(rule, {})
        sound, reference = results["privacy"][rule]["soundness"], own.get("reference")
        why = own.get("why_no_epsilon")
        method = words.METHODS.get(rule, "A custom rule.")
        entries += (
            f"<dt>{text(display(rule))}</dt><dd>{text(method)} "
            f"<em>{text(sound[:1].upper() + sound[1:])}{text(f': {why}' if why else '')}.</em>"
            f"{f' <cite>{text(reference)}</cite>' if reference else ''}</dd>"
        )
    return (
        '<section aria-labelledby="methods"><h2 id="methods">How each method works</h2>'
        f"<dl>{entries}</dl></section>"
    )


def _settings(results: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{text(display(rule))}</th>'
        f"<td><code>{text(given['rule'])}</code></td>"
        f"<td>{text(', '.join(f'{lr:g}' for lr in dict.fromkeys(given['lr'])))}</td></tr>"
        for rule, given in results["settings"].items()
    )
    versions: Mapping[str, Any] = next(
        (s.get("versions", {}) for s in results["statement"].values()), {}
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in results["notes"])
    command = results.get("command")
    made = f"<p>Made by</p><pre>{text(command)}</pre>" if command else ""
    versions_text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        '<section aria-labelledby="settings"><h2 id="settings">Settings</h2>'
        + wide(
            "Settings of every rule",
            '<table class="words"><thead><tr><th scope="col">Rule</th><th scope="col">Settings</th>'
            f'<th scope="col">Learning rate</th></tr></thead><tbody>{rows}</tbody></table>',
        )
        + f"{made}<p>{text(versions_text)}</p>"
        f"{f'<h3>Notes</h3><ul>{notes}</ul>' if notes else ''}</section>"
    )
