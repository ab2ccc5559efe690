"""A report in a real browser: its numbers, its charts on a phone, and its picture."""

import pytest
from matplotlib import image

from deepspeed_recipes.recipe.run_folder import RunFolder, read_jsonl
from deepspeed_recipes.report import write
from tests import browser
from tests.ranks import run_on
from tests.small import small
from tests.test_report import a_run, at, check_numbers

pytestmark = pytest.mark.skipif(browser.program() is None, reason="no Chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write.page(a_run(tmp_path_factory.mktemp("runs") / "run"))


def shown(page, width=browser.DESK):
    """Return what the browser shows, with its numbers as `check_numbers` takes them."""
    found = browser.read(page, width)
    return found | {"numbers": [(source, float(value), text) for source, value, text in found["numbers"]]}


def test_a_browser_shows_the_numbers_of_the_run_folder(page):
    found = shown(page)
    check_numbers(RunFolder(page.parent), found["numbers"])
    assert len(found["numbers"]) > 300 and found["title"] == "tiny-3m-full"
    assert not found["asked"], "one file"


def test_a_number_that_is_not_the_run_folders_is_noticed(page, tmp_path):
    wrong = tmp_path / "report.html"
    wrong.write_text(page.read_text().replace('<data value="0.975"', '<data value="0.97"'))
    with pytest.raises(AssertionError, match="after"):
        check_numbers(RunFolder(page.parent), shown(wrong)["numbers"])


def test_a_phone_shows_it_without_scrolling_sideways(page):
    found = shown(page, browser.PHONE)
    assert found["width"] == browser.PHONE and found["smallest"] >= 12
    seen = [width for width in found["charts"] if width]
    assert len(seen) == 6, "of the loss one axis is shown"
    assert all(0.85 * browser.PHONE < width < browser.PHONE for width in seen)


def test_the_picture_is_that_of_the_page(page, tmp_path):
    browser.main(page.parent, tmp_path / "report.png")
    pixels = image.imread(tmp_path / "report.png")
    assert pixels.shape[:2] == (1250, browser.DESK)
    assert 0.01 < (pixels[..., :3].mean(axis=2) < 0.6).mean() < 0.3, "text on a light page"


@pytest.mark.every
def test_the_report_of_a_real_run(ranks, model_folder, conversations, tmp_path):
    run = run_on(ranks, small(model_folder, conversations, "zero3.json"), tmp_path)
    found = shown(write.page(run))
    for source, value, _ in found["numbers"]:
        assert source.startswith("data.json") or value == at(run, source), source
    sources = {source for source, *_ in found["numbers"]}
    for number, row in enumerate(read_jsonl(run.metrics), 1):
        numbers = {key for key, value in row.items() if value is not None} - {"layers"}
        assert {f"metrics.jsonl:{number}:{key}" for key in numbers} <= sources
    assert "summary.json:tokens_per_second" in sources
