"""report.html: every number is the run folder's, data never becomes markup, and any run can be compared and listed."""

import json
import re
from html.parser import HTMLParser
from statistics import fmean, median

import pytest

from deepspeed_recipes.commands import main
from deepspeed_recipes.commands import report as command
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import printable
from deepspeed_recipes.recipe.overrides import apply
from deepspeed_recipes.recipe.run_folder import (
    RunFolder,
    accept_recipe,
    append_jsonl,
    read_json,
    read_jsonl,
    read_recipe,
    write_json,
    write_jsonl,
    write_recipe,
)
from deepspeed_recipes.report import charts, run_data, text, write
from deepspeed_recipes.report.page import Chart, Curve, Document, Note, duration
from deepspeed_recipes.report.sections import curves, examples, hardware, results, settings

HOSTILE = '</pre><script>alert("1")</script>\'" onload=x&amp;<img src=http://e.example/x>\x1b[31m\x00\ud800'
VOID = {"meta", "input"}


class Page(HTMLParser):
    """What a test asks of a page: its elements, numbers, links and text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.numbers, self.text = [], [], [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs), (tag, attrs)
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[key] for key in ("href", "src") if key in found]
        if tag == "data":
            self.numbers.append([found["data-from"], float(found["value"]), ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "data":
            self.numbers[-1][2] += data


def a_run(path, variant="full", changes=(), steps=30, scale=1.0):
    """Write a run folder as a run on a GPU leaves it, without running anything."""
    run = RunFolder(path)
    write_recipe(run, apply(pages.find("tiny", variant), changes))
    for step in range(1, steps + 1):
        loss = scale * 8 / step
        row = {"step": step, "loss": loss, "learning_rate": 1e-3 / step, "grad_norm": 12.3456789 / step}
        row |= {
            "tokens_per_second": 1000.0 + step,
            "tokens": 512 * step,
            "seconds": 0.5 * step,
            "mfu": 0.4 + step / 1e3,
        }
        append_jsonl(run.metrics, row | {"data_wait_seconds": 0.01, "gpu_peak_gib": 3.25, "host_peak_gib": 1.5})
    for step, loss in ((0, 8.5), (steps, 0.25)):
        append_jsonl(run.evaluations, {"step": step, "loss": loss * scale, "exact_match": 0.975 if step else 0.0})
    for step, answer in ((0, "blue blue"), (steps, '{"name":"Ada"}')):
        append_jsonl(run.answers, {"step": step, "prompt": "Who?", "expected": '{"name":"Ada"}', "answer": answer})
    append_jsonl(run.restarts, {"time": 1.7e9, "cause": "rank 1 failed", "from_step": 20, "ranks": 2})
    predicted = {"gpu_allocated_gib": 3.5, "gpu_reserved_gib": 3.7, "tokens_per_second": 1200.5}
    predicted["components_gib"] = {"parameters": 1.25, "activations": 2.25}
    summary = {"recipe": "tiny-3m-full", "stopped": False, "steps": steps, "metric": "exact_match", "before": 0.0}
    summary |= {"after": 0.975, "tokens": 512 * steps, "seconds": 0.5 * steps, "tokens_per_second": 1024.0}
    summary |= {"logit_difference": 1.25e-7, "gpu_peak_gib": 3.25, "gpu_reserved_gib": 3.5, "predicted": predicted}
    write_json(run.summary, summary)
    training = {"examples": 60, "dropped": 1, "unlearnable": 0, "extra_pieces": 0, "sequences": 20, "tokens": 4800}
    training |= {"loss_tokens": 1900, "lengths": [[44, 55, 10], [56, 67, 49]]}
    write_json(run.data, {"training": training, "shown": [[["Who is it?", False], ["Ada", True]]]})
    layers = [{"name": "layer 0", "parameters": 4096, "optimizer": 12288}]
    for rank in range(2):
        write_json(run.ranks / f"rank-{rank}.json", {"rank": rank, "layers": layers})
    write_json(run.environment, {"packages": {"torch": "2.13.0"}, "world_size": 2, "gpus": [], "git_commit": "abc"})
    write_json(run.deepspeed, {"zero_optimization": {"stage": 3}})
    run.command.write_text("python scripts/launch.py tiny full\n")
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def page(run):
    return write.render(write.document(run_data.read(run.path)))


OVER_TIME = {"mean": fmean, "highest": max}


def samples(rows, key, who):
    """Return what was sampled of a rank or node, in the unit that the report shows."""
    owner, number = who.split()
    unit = 1e9 if key.endswith("_per_second") else 1
    return [row[key] / unit for row in rows if str(row.get(owner)) == number and row.get(key) is not None]


def at(run, source):
    """Return the value that a number's source names."""
    file, _, key = source.partition(":")
    if file.endswith(".jsonl"):
        number, _, key = key.partition(":")
        rows = read_jsonl(run.path / file)
        if number == "count":
            return len(rows)
        if number == "median":
            return median(row[key] for row in rows)
        if number in OVER_TIME:
            return OVER_TIME[number](samples(rows, *key.split(":")))
        row = rows[int(number) - 1]
        if key.startswith("layers:"):
            _, layer, of_layer = key.split(":")
            return row["layers"][layer][of_layer]
        return row[key]
    if file == "ranks":
        rank, _, key = key.partition(":")
        value = read_json(run.ranks / f"rank-{rank}.json")
        if key in ("parameters", "optimizer"):
            return sum(layer[key] for layer in value["layers"]) / 2**20
    else:
        value = read_json(run.path / file)
    if source == "data.json:filled":
        return value["training"]["tokens"] / (value["training"]["sequences"] * 256)
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def test_every_number_is_the_run_folders(run, page):
    numbers = Page(page).numbers
    assert len(numbers) > 30 * 10 + 20
    check_numbers(run, numbers)
    sources = {source for source, *_ in numbers}
    for key in ("before", "after", "tokens_per_second", "predicted.tokens_per_second", "gpu_peak_gib"):
        assert f"summary.json:{key}" in sources


def check_numbers(run, numbers):
    """Compare numbers (source, exact, as shown) with the run folder; all logged ones are among them."""
    for source, value, shown in numbers:
        assert value == at(run, source), source
        if ":" in shown:
            assert shown == duration(value)
            continue
        digits, share = re.match(r"([\d.,e+-]+)(%?)", shown).groups()
        # Rounded at its last digit, and no further.
        mantissa, _, exponent = digits.replace(",", "").partition("e")
        last = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        significant = len(mantissa.replace(".", "").lstrip("0"))
        coarse = 10 ** (len(str(int(float(mantissa)))) - significant) if "." not in mantissa else last
        scale = 100 if share else 1
        assert abs(value * scale - float(digits.replace(",", ""))) <= max(last, coarse) * 0.5000001, (source, shown)
    sources = {source for source, *_ in numbers}
    for row, number in ((row, at) for at, row in enumerate(read_jsonl(run.metrics), 1)):
        assert {f"metrics.jsonl:{number}:{key}" for key in row} <= sources


def test_a_wrong_number_is_noticed(run, page):
    changed = page.replace('<data value="0.975"', '<data value="0.97"')
    assert changed != page
    assert any(value != at(run, source) for source, value, _ in Page(changed).numbers)


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    found = Page(page)
    assert len(found.ids) == len(set(found.ids)) > 10
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links)
    assert not re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", page)
    assert not {"script", "iframe", "link", "img"} & {tag for tag, _ in found.tags}
    assert len(page.encode()) < 5 * 2**20
    assert page.startswith("<!DOCTYPE html>") and 'name="viewport"' in page
    assert [tag for tag, _ in found.tags].count("svg") == 7, "loss twice, rate, norm, speed, MFU, restarts"
    assert "waiting for data: 0.02 at all 30 measurements." in page, "a sentence, not a flat line"


def test_the_sections_are_in_order_and_the_verdict_is_first(page):
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles[0] == "Verdict" and titles[-1] == "Restarts and failures"
    assert "Exact match on held-out examples: 0.0% -&gt; 97.5%" in page.partition("<h2>Curves")[0]
    assert "rank 1 failed" in page and "2023-11-14 22:13:20" in page


def test_restarts_are_on_the_time_axis(run):
    chart = settings.restarts(run_data.read(run.path)).blocks[1]
    assert chart.curves[0].points[-1] == (15.0, 30) and chart.marks == (10.0,), "step 20 ended after 10 seconds"


def test_predicted_memory_is_beside_the_measured(run):
    on_gpu, on_host = hardware.memory(run_data.read(run.path)).blocks
    bars = {label: [(part, size.value) for part, size in parts] for label, parts in on_gpu.rows}
    assert bars == {
        "predicted, by purpose": [("parameters", 1.25), ("activations", 2.25)],
        "allocated at most, rank 0": [("allocated at most, rank 0", 3.25)],
        "reserved at most, rank 0": [("reserved at most, rank 0", 3.5)],
    }
    assert [label for label, _ in on_host.rows] == ["resident at most, rank 0"]


def test_hostile_text_stays_text(tmp_path):
    run = a_run(tmp_path / "<b>&run", changes=["data.path=x"])
    clean = Page(write.render(write.document(run_data.read(run.path))))
    recipe = read_json(run.recipe)
    shown = HOSTILE.partition("\x1b")[0]  # a recipe refuses control characters
    recipe["data"]["path"] = recipe["model"]["path"] = recipe["deepspeed"] = shown
    write_json(run.recipe, recipe)
    rows = [row | {"prompt": HOSTILE, "answer": HOSTILE, "expected": HOSTILE} for row in read_jsonl(run.answers)]
    run.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(run.environment, {"packages": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE})
    write_json(run.deepspeed, {HOSTILE: HOSTILE})
    write_json(run.data, {"shown": [[[HOSTILE, True]]], "training": {}})
    write_json(run.ranks / "rank-0.json", {"rank": HOSTILE, "layers": [{"name": HOSTILE, "parameters": 1}]})
    append_jsonl(run.restarts, {"time": HOSTILE, "cause": HOSTILE, "from_step": HOSTILE, "ranks": HOSTILE})
    append_jsonl(run.metrics, {"step": 31, "loss": HOSTILE, HOSTILE: HOSTILE, f"rewards/{HOSTILE}": 1.0})
    run.command.write_text(HOSTILE, encoding="utf-8", errors="replace")
    document = write.render(write.document(run_data.read(run.path)))
    document.encode("utf-8")
    found = Page(document)
    assert "\x1b" not in document and "\x00" not in document
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in clean.tags} | {"pre"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert all(link.startswith("#") for link in found.links)
    assert '<script>alert("1")</script>' in "".join(found.text)


def test_text_has_no_control_characters(tmp_path, capsys):
    run = a_run(tmp_path / "run\x1b[31m")
    text.show(write.document(run_data.read(run.path)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\\x1b[31m" in shown and "Exact match, after" in shown
    assert printable("a\tb\nc\u00e9\u200d\u202e\ud800") == "a\tb\nc\u00e9\u200d\\u202e\\ud800"


def test_the_command_prints_the_verdict_and_writes_the_page(run, tmp_path, printed_by):
    shown = printed_by("report", run.path, "--output", tmp_path / "page.html")
    assert "0.0% -> 97.5%" in shown and "1,200" in shown and "«Ada»" in shown and "+blue" not in shown
    assert Page((tmp_path / "page.html").read_text()).numbers
    assert not run.report_page.exists(), "a command that shows changes nothing"


def test_several_runs_are_compared(run, tmp_path, capsys):
    other = a_run(tmp_path / "other", changes=["learning_rate=5e-4"], steps=12, scale=2)
    assert main.run("report", [str(run.path), str(other.path), "--output", str(tmp_path / "both.html")]) == 0
    page = Page((tmp_path / "both.html").read_text())
    for source, value, _ in page.numbers:
        owner = next(one for one in (run, other) if source.startswith(f"{one.path}/"))
        assert value == at(owner, source.removeprefix(f"{owner.path}/"))
    shown = capsys.readouterr().out
    differing = re.findall(r"^(\w[\w.]*)\s+0\.002\s+0\.0005", shown, re.MULTILINE)
    assert differing == ["learning_rate"] and "CURVES OVER TOKENS" in shown
    assert {"run", "other"} <= set(re.findall(r"\w+", shown.partition("RESULTS")[0]))
    document = write.comparison([run_data.read(one.path) for one in (run, other)])
    over_tokens = next(section for section in document.sections if section.title == "Curves over tokens")
    speed = next(chart for chart in over_tokens.blocks if chart.title.startswith("Tokens per second"))
    assert speed.curves[1].points[-1] == (512 * 12, 1012.0)


def test_mistakes_are_one_line_and_status_2(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    started = RunFolder(tmp_path / "started")
    write_recipe(started, pages.find("tiny", "full"))
    pairs = a_run(tmp_path / "pairs", variant="dpo_lora")
    broken = a_run(tmp_path / "broken")
    broken.metrics.write_text("{]}\n")
    for words, said in (
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path / "empty")], "not a run folder"),
        ([str(started.path)], "has not logged a step"),
        ([str(broken.path)], "not a JSON object"),
        ([], "name a run folder"),
        ([str(run.path), str(pairs.path)], "cannot be compared"),
        ([str(run.path), str(run.path)], "named twice"),
        ([str(run.path), "--output", str(tmp_path)], "a folder, not a file"),
        ([str(run.path), "--output", str(run.metrics)], "exists, and is not HTML"),
    ):
        assert main.run("report", words) == 2, words
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1 and said in lines[0], lines
    assert main.run("report", [str(run.path), str(started.path)]) == 0
    said = capsys.readouterr()
    assert said.err == f"left out: {started.path}, which has not logged a step\n" and str(run.path) in said.out


def test_a_defect_of_the_report_fails_no_run(tmp_path, capsys):
    run = a_run(tmp_path / "run")
    write.at_end(run)
    assert run.report_page.exists() and not capsys.readouterr().err
    run.report_page.unlink()
    write_json(run.data, {"training": {"lengths": 5}})
    write.at_end(run)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "could not be written" in said[0] and not run.report_page.exists()
    write.at_end(RunFolder(tmp_path / "nothing"))
    assert not capsys.readouterr().err and not (tmp_path / "nothing").exists()


def test_unfinished_stopped_and_numberless_runs_are_shown(tmp_path):
    run = a_run(tmp_path / "run", steps=1)
    run.summary.unlink()
    append_jsonl(run.metrics, {"step": 2, "loss": float("nan"), "grad_norm": float("inf"), "learning_rate": None})
    page = write.render(write.document(run_data.read(run.path)))
    assert "Not finished: 2 steps" in page and Page(page).numbers
    write_json(run.summary, {"stopped": True, "steps": 2})
    assert results.sentence(run_data.read(run.path)).startswith("Stopped after 2 steps")


def test_a_run_of_one_update_shows_its_loss_once_and_its_warning(tmp_path):
    run = a_run(tmp_path / "run", steps=1)
    summary = read_json(run.summary) | {"before": None, "after": None, "warning": "warning: 1 update in all."}
    write_json(run.summary, summary)
    sentence = results.sentence(run_data.read(run.path))
    assert re.fullmatch(r"Training loss \d+\.\d{4} before the only update, in 1 step, .* of training\.", sentence)
    assert "warning: 1 update in all." in write.render(write.document(run_data.read(run.path)))


def test_the_index_lists_all_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write, "runs", lambda: tmp_path)
    first = a_run(tmp_path / "tiny-3m-full" / "20260101-000000")
    second = a_run(tmp_path / "tiny-3m-full" / "20260102 & <b>", changes=["learning_rate=5e-4"])
    damaged = RunFolder(tmp_path / "tiny-3m-full" / "20250101-000000")
    write_recipe(damaged, pages.find("tiny", "full"))
    for run in (first, second):
        run.report_page.touch()
    write.page(second)
    found = Page((tmp_path / "index.html").read_text())
    assert found.links == [
        "#s1",
        "tiny-3m-full/20260102%20%26%20%3Cb%3E/report.html",
        "tiny-3m-full/20260101-000000/report.html",
    ]
    words = "".join(found.text)
    assert "learning_rate=0.0005" in words and "3 runs" in words and "has not logged a step" in words
    outside = a_run(tmp_path.parent / f"{tmp_path.name}-outside")
    before = (tmp_path / "index.html").stat().st_mtime_ns
    write.page(outside)
    assert (tmp_path / "index.html").stat().st_mtime_ns == before
    monkeypatch.setattr(command, "runs", lambda: tmp_path)
    assert command.main(["--index"]) == 0 and "index.html" in capsys.readouterr().out


def test_a_recipe_is_compared_with_its_page():
    page = pages.find("tiny", "full")
    from deepspeed_recipes.launching.paths import locate

    assert not list(settings.differences(page, locate(page))), "paths that the launcher has made absolute"
    changed = locate(apply(page, ["learning_rate=1e-5", "lora.rank=4", "deepspeed=zero2.json"]))
    found = {key: (before, after) for key, before, after in settings.differences(page, changed)}
    assert found["learning_rate"] == ("0.002", "1e-05") and found["lora.rank"] == ("none", "4")
    assert found["deepspeed"][1].endswith("configs/zero2.json") and "data.path" not in found
    found = {key: after for key, _, after in settings.explained(page, apply(page, ["data.path=own.jsonl"]))}
    assert found["data.validation"] == "none (data.validation_share holds out examples)"
    assert found["data.validation_share"].startswith("auto (5 %,") and found["data.metric"].startswith(
        "loss (the page's"
    )
    found = {key: after for key, _, after in settings.explained(page, apply(page, ["data.validation=none"]))}
    assert (found["data.validation"], found["data.metric"]) == (
        "none",
        "loss (the page's exact_match is for its own examples)",
    )


def test_answers_are_marked_where_they_differ():
    pieces = examples.differences("the red car", "the blue car!")
    assert "".join(text for text, mark in pieces if mark != "removed") == "the blue car!"
    assert "".join(text for text, mark in pieces if mark != "added") == "the red car"
    assert ("!", "added") in pieces and examples.differences("a", "a") == (("a", ""),)


def test_curves_are_smoothed_without_bias_and_long_ones_keep_their_extremes():
    flat = tuple((step, 2.0) for step in range(50))
    assert [value for _, value in curves.smoothed(flat)] == pytest.approx([2.0] * 50)
    assert list(
        curves.waits(
            [
                {"step": 1, "seconds": 2.0, "data_wait_seconds": 0.5},
                {"step": 2, "seconds": 3.0, "data_wait_seconds": 0.25},
            ]
        )
    ) == [(1, 0.25), (2, 0.25)]
    points = tuple((step, 100.0 if step == 7777 else step % 3 - 1.0) for step in range(10_000))
    kept = charts.visible(Curve("loss", points), log=False)
    assert len(kept) <= charts.MOST_DRAWN + 2 and (7777, 100.0) in kept and min(kept, key=lambda one: one[1])[1] == -1
    assert all(value > 0 for _, value in charts.visible(Curve("loss", points), log=True))


def test_a_chart_says_its_numbers_in_the_pages_colours():
    drawn = charts.svg(Chart("Loss", "step", (Curve("a<b", ((1, 0.5), (2, 0.25))),), marks=(1.5,)), "c1")
    assert re.findall("<title>(.*?)</title>", drawn) == ["a&lt;b, 1: 0.5", "a&lt;b, 2: 0.25"]
    assert not re.findall("#0a0[bc]", drawn) and "var(--curve-0)" in drawn and "var(--mark)" in drawn
    assert drawn == charts.svg(Chart("Loss", "step", (Curve("a<b", ((1, 0.5), (2, 0.25))),), marks=(1.5,)), "c1")


def test_the_verdict_judges_the_result(tmp_path):
    run = a_run(tmp_path / "run", changes=["data.metric=loss"], steps=30)

    def judged(before, after, **more):
        write_json(run.summary, read_json(run.summary) | {"metric": "loss", "before": before, "after": after} | more)
        return results.judgement(run_data.read(run.path))

    assert judged(8.5, 5.865) == "It fell by 31%."
    assert judged(8.5, 8.5) == "It did not change."
    losses = [row["loss"] for row in read_jsonl(run.evaluations)]
    fell = f"It did not change, but the held-out loss fell by {1 - losses[-1] / losses[0]:.0%}."
    assert losses[-1] < losses[0] and judged(0.0, 0.0, metric="exact_match") == fell
    append_jsonl(run.evaluations, {"step": 40, "loss": 0.5})
    assert judged(8.5, 0.5) == (
        "It fell by 94%; the held-out loss was lowest at step 30 and has risen since: train for less, or more slowly."
    )
    write_json(run.data, {"held_out": {"examples": 16}})
    chance = judged(0.5, 0.6, metric="exact_match")
    assert chance == "It rose by 10.0 points; on 16 examples such a difference can be chance."
    few = a_run(tmp_path / "few", steps=1)
    assert results.judgement(run_data.read(few.path)) == "It rose by 97.5 points; 1 update is too few to judge."


def test_scores_on_other_held_out_examples_are_not_compared(tmp_path):
    """A resumed run may have got others, with data.changed=true."""
    run = a_run(tmp_path / "run")
    rows = read_jsonl(run.evaluations)
    write_jsonl(run.evaluations, [row | {"held_out": "b" if row is rows[-1] else "a"} for row in rows])
    write_json(run.summary, read_json(run.summary) | {"metric": "loss", "before": None, "after": rows[-1]["loss"]})
    data = run_data.read(run.path)
    assert results.sentence(data).endswith("; before training it was not measured on them.")
    assert "before" not in " ".join(str(name) for name, *_ in results.rows(data))
    assert results.judgement(data).startswith("Nothing was measured so before training")


def test_an_evaluation_from_before_the_run_was_resumed_is_named_as_such(tmp_path):
    run = a_run(tmp_path / "run")
    told, models = ", measured before the run was resumed, of its model then:", [{"name": "export", "score": 1.0}]
    one = {"metric": "loss", "examples": 4, "data": "a.jsonl", "models": models}

    def notes():
        (section,) = results.evaluation(run_data.read(run.path))
        return [block.text.endswith(told) for block in section.blocks if isinstance(block, Note)]

    write_json(run.evaluation, one | {"tasks": [one]})
    accept_recipe(run)  # a step of the run that was evaluated
    assert notes() == [False, False]
    write_recipe(run, read_recipe(run))
    accept_recipe(run)
    assert notes() == [True, True]
    write_json(run.evaluation, one | {"tasks": read_json(run.evaluation)["tasks"]})  # as `evaluate` does
    assert notes() == [False, True]


def test_the_verdict_says_what_was_trained_where_and_how(tmp_path):
    run = a_run(tmp_path / "run", changes=["lora.rank=4"])
    gpus = {"gpus": ["H100", "H100"], "world_size": 4, "started": "2026-01-02T03:04:05+00:00"}
    write_json(run.environment, read_json(run.environment) | gpus)
    (run.ranks / "rank-0.log").write_text("step 1/30\nwarning: 3 are dropped\nwarning: 3 are dropped\n")
    facts = dict(results.overview(run_data.read(run.path)))
    assert facts["Method"].startswith("Supervised fine-tuning, LoRA of rank 4, fp32")
    assert facts["Hardware"] == "4 ranks; 2 x H100 on the first node" and facts["Started"] == "2026-01-02 03:04 UTC"
    page = write.render(Document("", "", (results.verdict(run_data.read(run.path)),)))
    assert page.count("warning: 3 are dropped") == 1


def test_fewer_than_three_points_and_constants_are_sentences():
    def block(*values):
        return Chart("rate", "step", (Curve("training", tuple(enumerate(values, 1))),)).block()

    assert block(1.0, 2.0).text == "Rate: 1 at step 1, 2 at step 2."
    assert block(1.0, 1.0, 1.0).text == "Rate: 1 at all 3 measurements." and isinstance(block(1.0, 2.0, 1.0), Chart)
    nearly = charts.svg(block(1.0, 1.001, 1.0), "c1")
    assert ">0.0<" in nearly and ">0.96<" not in nearly, "the axis begins at 0"
    assert ">0.0<" not in charts.svg(block(1.0, 1.1, 1.0), "c1")


def test_special_tokens_are_shown_as_such_and_other_text_is_not(tmp_path):
    run = a_run(tmp_path / "run")
    shown = [[["<|user|>Is <b> bold?", False], ["Yes<|end|>", True]]]
    write_json(run.data, read_json(run.data) | {"shown": shown, "special_tokens": ["<|user|>", "<|end|>"]})
    found = Page(write.render(Document("", "", (examples.data(run_data.read(run.path)),))))
    assert [tag for tag, _ in found.tags].count("code") == 2 and "Is <b> bold?" in found.text


def test_a_comparison_says_where_the_held_out_examples_differ(run, tmp_path):
    def note(*changes, **counts):
        other = a_run(tmp_path / "".join(changes) / str(counts), changes=changes)
        write_json(other.data, read_json(run.data) | counts)
        results_section = write.comparison([run_data.read(run.path), run_data.read(other.path)]).sections[0]
        return [block.text for block in results_section.blocks if hasattr(block, "text")]

    assert not note("learning_rate=5e-4")
    [said] = note("data.validation=other.jsonl", held_out={"examples": 20})
    assert "so the held-out scores do not compare" in said and "20 of other.jsonl" in said
    run = a_run(tmp_path / "first", changes=("data.path=own.jsonl",))
    assert not note("data.path=own.jsonl", "seed=7"), "the seed does not choose them"
    assert note("data.path=own.jsonl", "data.validation_share=0.2")


def test_the_two_accuracies_of_pairs_have_two_names(tmp_path):
    pairs, reward = (run_data.read(a_run(tmp_path / one, variant=one).path).recipe for one in ("dpo_lora", "reward"))
    assert curves.named(pairs, "preference_accuracy").startswith("Preference accuracy")
    assert curves.named(pairs, "rewards/accuracies").startswith("Implicit reward accuracy")
    assert curves.named(reward, "preference_accuracy") == "Preference accuracy"
