"""Tests of report.html in a browser: no requests, no errors, and no barriers for readers.

`make browser` installs their dependencies (Playwright and axe-core; Chromium comes from the system)
and runs them.
"""

import os
import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed; run `make browser`"
)

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
AXE = Path(
    os.environ.get(
        "EVENCLIP_AXE", Path(__file__).parents[2] / ".browser/node_modules/axe-core/axe.min.js"
    )
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium; install it (Debian: chromium)"
)
SCREENS = {"desk": (1000, 800), "phone": (360, 740)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The page of a comparison with ten groups."""
    import evenclip
    from evenclip.report.page import page

    folder = tmp_path_factory.mktemp("report")
    comparison = evenclip.compare(
        "digits", seeds=3, epochs=2, model="linear", store=folder / "runs"
    )
    path = folder / "report.html"
    path.write_text(page(comparison.to_json()), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_it_asks_for_nothing_and_nothing_sticks_out(browser, report, screen, scheme):
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    requested, said = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(report.as_uri())
    assert requested == [report.as_uri()]
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg.chart").count() >= 5
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 31)")
    page.close()


def test_it_is_whole_without_scripts(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("h1").inner_text().startswith("At ε = ")
    assert page.locator("table").count() >= 5
    context.close()


def test_it_prints_on_paper(browser, report, tmp_path):
    page = browser.new_page()
    page.goto(report.as_uri())
    pdf = page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert pdf.startswith(b"%PDF")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.close()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there; run `make browser`")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, report, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.goto(report.as_uri())
    page.add_script_tag(path=AXE)
    results = page.evaluate("axe.run()")
    serious = [v for v in results["violations"] if v["impact"] in ("serious", "critical")]
    assert [(v["id"], [node["html"] for node in v["nodes"]][:3]) for v in serious] == []
    assert len(results["passes"]) > 10
    page.close()
