"""Every family and variant trains for real: as a draft, on two ranks, with the configuration that it names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.spec import pages
from recipes.spec.recipe import Data, Draft, Recipe, Schedule, Wandb
from recipes.spec.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from recipes.training import run as training_run
from recipes.training.preflight import locate
from tests.conftest import conversation

QUESTION, ANSWER = "Felix Vandland paid 51 euros on 14 March 2028.", '{"name": "Felix Vandland", "amount": 51}'
ROWS = {
    "sft": conversation(QUESTION, ANSWER),
    "pretrain": {"text": QUESTION + " " + ANSWER},
    "dpo": {
        "prompt": [{"role": "user", "content": QUESTION}],
        "chosen": [{"role": "assistant", "content": ANSWER}],
        "rejected": [{"role": "assistant", "content": '{"name": "Vandland", "amount": 15}'}],
    },
}


def combinations() -> list[tuple[str, str, str]]:
    """Return every family and variant, once for each DeepSpeed configuration that it names over the family's sizes."""
    found = []
    for family in pages.families():
        module = pages.page(family)
        for variant in pages.variants(module):
            by_config = {getattr(module, variant)(size).deepspeed: size for size in reversed(module.SIZES)}
            found += [(family, size, variant) for size in reversed(by_config.values())]
    return found


def test_there_are_families_and_variants():
    assert len(combinations()) >= 4


def lesson(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe as a draft that sees the same batch three times."""
    row = ROWS[recipe.method]
    path = folder / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(8)), encoding="utf-8")
    metric = "preference_accuracy" if recipe.method == "dpo" else "loss"
    return replace(
        recipe,
        data=Data(path=str(path), validation=str(path), metric=metric),
        draft=Draft(enabled=True),
        learning_rate=1e-2,
        schedule=Schedule("constant", warmup=0),
        max_steps=3,
        global_batch_size=2,
        micro_batch_size=1,
        sequence_length=128,
        packing=False,
        logging_steps=1,
        save_steps=2,
        wandb=Wandb(mode="disabled"),
    )


@pytest.mark.parametrize(("family", "size", "variant"), combinations())
def test_it_trains_resumes_and_exports(ranks, tmp_path, family, size, variant):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, locate(lesson(pages.find(f"{family}-{size}", variant), tmp_path)))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    records, summary = read_jsonl(run.metrics), read_json(run.summary)
    assert [row["step"] for row in records] == [1, 2, 3]
    if summary["metric"] == "loss":
        assert summary["after"] < summary["before"]
    else:
        assert records[2]["loss"] < records[0]["loss"]
    assert summary["logit_difference"] <= (1e-4 if read_json(run.recipe)["precision"] == "fp32" else 3e-2)

    again = RunFolder(tmp_path / "again")
    shutil.copytree(run.path, again.path)
    shutil.rmtree(again.export)
    for checkpoint in again.checkpoints.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)
    again.metrics.unlink()
    ranks.check(training_run.main, str(again.path), log=tmp_path / "again.log")
    (resumed,) = read_jsonl(again.metrics)
    assert resumed["step"] == 3
    assert resumed["loss"] == pytest.approx(records[2]["loss"], rel=1e-3)
    assert resumed["grad_norm"] == pytest.approx(records[2]["grad_norm"], rel=1e-2)
