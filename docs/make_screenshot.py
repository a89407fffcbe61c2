"""The picture of a report that the README and the start page show.

    evenclip compare adult --out look/
    python docs/make_screenshot.py look/report.html [docs/_static/report.png]

Needs Playwright (`pip install 'evenclip[browser]'`) and a Chromium that the system has.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

WIDTH, HEIGHT = 1000, 1500
LARGEST = 250_000  # bytes; a README is opened more often than it is read


def main() -> None:
    """Take the picture of the top of a page, as large as the limit allows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="report.html, made by `evenclip compare --out`")
    parser.add_argument(
        "out", type=Path, nargs="?", default=Path(__file__).parent / "_static" / "report.png"
    )
    arguments = parser.parse_args()
    for scale in (1.5, 1.25, 1.0, 0.8, 0.6):
        png = picture(arguments.report, scale)
        if len(png) < LARGEST:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_bytes(png)
            print(f"{arguments.out}: {len(png):,} bytes, {scale:g} pixels to a point")
            return
    raise SystemExit(f"{arguments.report} makes more than {LARGEST:,} bytes at every scale.")


def picture(report: Path, scale: float) -> bytes:
    """The top of the page as a PNG."""
    from playwright.sync_api import sync_playwright

    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT},
                device_scale_factor=scale,
                color_scheme="light",
            )
            page.goto(report.resolve().as_uri())
            height = min(HEIGHT, page.evaluate("document.documentElement.scrollHeight"))
            return page.screenshot(
                clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, full_page=True
            )
        finally:
            browser.close()


if __name__ == "__main__":
    main()
