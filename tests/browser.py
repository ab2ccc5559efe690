"""A report in a real browser, Chromium without a window; as a command, takes its picture.

python -m tests.browser RUN .github/report.png
"""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed_recipes.report import run_data, write

PROGRAMS = ("chromium", "google-chrome", "chromium-browser")
PHONE, DESK = 390, 1000
"""Widths in pixels."""
READER = """<!DOCTYPE html><meta charset="utf-8"><style>body {{ margin: 0 }} iframe {{ border: 0 }}</style>
<iframe src="{page}" width="{width}" height="900"></iframe><pre></pre>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  for (const folded of page.querySelectorAll("details")) folded.open = true;
  const numbers = [...page.querySelectorAll("data")].map(one => [one.dataset.from, one.value, one.innerText]);
  const charts = [...page.querySelectorAll("svg")].map(one => one.getBoundingClientRect().width);
  const fonts = [...page.querySelectorAll("p, td, h2")].map(one => parseFloat(getComputedStyle(one).fontSize));
  const asked = page.defaultView.performance.getEntriesByType("resource").map(one => one.name);
  const found = {{ title: page.title, numbers, charts, smallest: Math.min(...fonts), asked }};
  found.width = page.documentElement.scrollWidth;
  document.querySelector("pre").textContent = JSON.stringify(found);
}}
</script>"""
"""Opens the page in a frame and writes what a browser makes of it."""


@cache
def program() -> str | None:
    """Return the browser; None: there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def read(page: Path, width: int) -> dict[str, Any]:
    """Return what a browser of that width shows.

    `numbers` (source, value, text), widths of `charts`, the `smallest` font in pixels, the `width` that the page needs,
    and what it has `asked` for beside itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        reader = Path(folder, "reader.html")
        reader.write_text(READER.format(page=page.resolve().as_uri(), width=width), encoding="utf-8")
        shown = _run(
            reader, Path(folder), "--dump-dom", "--virtual-time-budget=20000", "--allow-file-access-from-files"
        )
    found = re.search(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    assert found and found[1], shown[-2000:]
    return json.loads(html.unescape(found[1]))


def picture(page: Path, image: Path, height: int = 1250) -> None:
    """Write the upper part of a page as a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        _run(page.resolve(), Path(folder), f"--screenshot={image.resolve()}", f"--window-size={DESK},{height}")


def main(run: Path, image: Path) -> None:
    """Take the picture of a run, whose folder it shows as it is named here."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        write.html(page, write.document(run_data.read(run)))
        picture(page, image)


def _run(page: Path, folder: Path, *options: str) -> str:
    browser = program()
    assert browser, "no browser"
    # Root has no sandbox; its own folder as home, since a browser writes there.
    fixed = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}/profile",
    ]
    done = subprocess.run(
        [browser, *fixed, *options, page.as_uri()],
        env=os.environ | {"HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
