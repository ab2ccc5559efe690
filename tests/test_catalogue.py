"""Every family and variant trains for real: as a draft, on two ranks, with the configuration that it names."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.recipe import Data, Draft, Layout, Recipe, Schedule, Wandb
from deepspeed_recipes.recipe.run_folder import RunFolder, read_json, read_jsonl, write_recipe
from deepspeed_recipes.recipe.samples import REWARDS
from deepspeed_recipes.training import run as training_run
from tests.conftest import conversation

QUESTION, ANSWER = "Felix Vandland paid 51 euros on 14 March 2028.", '{"name": "Felix Vandland", "amount": 51}'
WRONG = '{"name": "Vandland", "amount": 15}'
ROWS = {
    "conversations": conversation(QUESTION, ANSWER),
    "prompts": conversation(QUESTION, ANSWER),
    "texts": {"text": QUESTION + " " + ANSWER},
    "labelled texts": {"text": QUESTION, "label": "payment"},
    "matching texts": {"anchor": ANSWER, "positive": QUESTION, "negative": WRONG},
    "judged answers": {"prompt": QUESTION, "completion": ANSWER, "label": True},
    "pairs": {
        "prompt": [{"role": "user", "content": QUESTION}],
        "chosen": [{"role": "assistant", "content": ANSWER}],
        "rejected": [{"role": "assistant", "content": WRONG}],
    },
}


def combinations() -> list[tuple[str, str, str]]:
    """Return every family and variant, once for each DeepSpeed configuration that it names over the family's sizes."""
    found = []
    for family in pages.families():
        module = pages.page(family)
        for variant in pages.variants(module):
            by_config = {pages.build(module, size, variant).deepspeed: size for size in reversed(module.SIZES)}
            found += [(family, size, variant) for size in reversed(by_config.values())]
    return found


def representative() -> set[tuple[str, str, str]]:
    """Return a choice of them that has every variant and every configuration, spread over the families."""
    seen: set[str] = set()
    chosen = set()
    everything = combinations()
    by_family = [[one for one in everything if one[0] == family] for family in pages.families()]
    for turn in range(max(map(len, by_family))):
        for number, own in enumerate(by_family):
            # Rotated, so that each family brings another variant than the one before it.
            one = own[(number + turn) % len(own)]
            recipe = pages.find(f"{one[0]}-{one[1]}", one[2])
            news = {f"variant {recipe.variant}", f"config {recipe.deepspeed}"} - seen
            if news:
                seen |= news
                chosen.add(one)
    return chosen


def test_the_matrix_is_complete():
    assert len(combinations()) >= 150
    assert len({family for family, _, _ in combinations()}) == len(pages.families()) >= 18
    few = representative()
    assert len({family for family, _, _ in few}) >= 8 and len(few) < 30
    assert {variant for _, _, variant in few} == {variant for _, _, variant in combinations()}


def short_run(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe as a draft that sees the same batch three times."""
    row, at_once = ROWS[recipe.method.examples], recipe.method.least_micro_batch
    others = {
        "judged answers": {"completion": WRONG, "label": False},
        "labelled texts": {"text": WRONG, "label": "mistake"},
        "matching texts": {"anchor": QUESTION, "positive": ANSWER},
    }
    differing = others.get(recipe.method.examples)
    rows = [row, row | differing] * max(2, at_once) if differing else [row] * 2 * at_once
    path = folder / "batch.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if recipe.method.rollouts:  # of random answers none is right, but some are shorter
        grpo = replace(recipe.method, group_size=2, max_new_tokens=16, temperature=2.0)
        recipe = replace(recipe, method=grpo, reward=f"{REWARDS}:short")
    return replace(
        recipe,
        data=Data(path=str(path), validation=str(path)),
        draft=Draft(enabled=True),
        layout=Layout(**{kind: min(2, size) for kind, size in asdict(recipe.layout).items()}),
        # With more, the head of a reward model overshoots, and adapters on a model that sees.
        learning_rate=1e-3 if recipe.method.headless or recipe.model.vision else 1e-2,
        schedule=Schedule("constant", warmup=0),
        max_steps=3,
        global_batch_size=len(rows),
        micro_batch_size=at_once,
        sequence_length=128,
        packing=False,
        logging_steps=1,
        save_steps=2,
        wandb=Wandb(mode="disabled"),
    )


IN_TEST = ("expert", "long_context", "three_d")
"""The variants that `make test` trains as their pages say; `make test-all` trains and resumes them all."""


@pytest.mark.parametrize(("family", "size", "variant"), sorted(one for one in representative() if one[2] in IN_TEST))
def test_it_trains_and_exports(ranks, tmp_path, family, size, variant):
    trained(ranks, tmp_path, family, size, variant)


def trained(ranks, tmp_path, family, size, variant):
    """Train and export, and return the run's folder and its number of ranks."""
    run = RunFolder(tmp_path / "run")
    recipe = short_run(pages.find(f"{family}-{size}", variant), tmp_path)
    write_recipe(run, locate(recipe))
    layout = recipe.layout
    world_size = max(2, layout.tensor * layout.pipeline * layout.sequence)
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log", world_size=world_size)
    records, summary = read_jsonl(run.metrics), read_json(run.summary)
    assert [row["step"] for row in records] == [1, 2, 3]
    if summary["metric"] == "loss":
        assert summary["after"] < summary["before"]
    elif "reward" in records[0]:  # the loss of a rollout is 0 before its first update
        assert summary["metric"] == "reward" and any(row["grad_norm"] > 0 for row in records)
    else:
        assert records[2]["loss"] < records[0]["loss"]
    assert summary["logit_difference"] <= (1e-4 if read_json(run.recipe)["precision"] == "fp32" else 3e-2)
    return run, world_size


@pytest.mark.every
@pytest.mark.parametrize(("family", "size", "variant"), combinations())
def test_it_trains_resumes_and_exports(ranks, tmp_path, family, size, variant):
    run, world_size = trained(ranks, tmp_path, family, size, variant)
    records = read_jsonl(run.metrics)
    again = RunFolder(tmp_path / "again")
    shutil.copytree(run.path, again.path)
    shutil.rmtree(again.export)
    for checkpoint in again.checkpoints.glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-2":
            shutil.rmtree(checkpoint)
    again.metrics.unlink()
    ranks.check(training_run.main, str(again.path), log=tmp_path / "again.log", world_size=world_size)
    (resumed,) = read_jsonl(again.metrics)
    assert resumed["step"] == 3
    assert resumed["loss"] == pytest.approx(records[2]["loss"], rel=1e-3, abs=1e-6)
    assert resumed["grad_norm"] == pytest.approx(records[2]["grad_norm"], rel=1e-2)
