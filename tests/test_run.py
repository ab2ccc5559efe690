"""Every method, end to end on two ranks: what a run folder holds, and that the export is the model that was trained."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_recipes.commands import export as export_script
from deepspeed_recipes.commands import generate as generate_script
from deepspeed_recipes.export import certificate
from deepspeed_recipes.launching.paths import locate
from deepspeed_recipes.planning.cost.states import state_bytes
from deepspeed_recipes.planning.cost.training_setup import TrainingSetup
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.conversions import from_dict, to_dict
from deepspeed_recipes.recipe.recipe import Draft, Layout, Lora, Schedule, Wandb
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    checkpoint_bytes,
    read_json,
    read_jsonl,
)
from deepspeed_recipes.training import run as training_run
from tests import ROOT
from tests.ranks import read_logs, run_on
from tests.tiers import tiered

LINES = 24


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Cut the shipped data sets to what a test needs."""
    folder = tmp_path_factory.mktemp("samples")

    def cut(path):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
        short = folder / path.replace("/", "_")
        short.write_text("".join(lines[:LINES]), encoding="utf-8")
        return str(short)

    return cut


def train(ranks, tmp_path, samples, variant, metric=None, **changes):
    """Run a variant of `tiny` for four steps and return its folder and what rank 0 printed."""
    recipe = pages.find("tiny", variant)
    data = replace(recipe.data, path=samples(recipe.data.path), validation=samples(recipe.data.validation))
    data = replace(data, max_new_tokens=4, metric=metric or data.metric)
    settings = {"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 2, "save_steps": 2, "eval_steps": 2}
    settings |= {"logging_steps": 1, "wandb": Wandb(mode="disabled")}
    run = run_on(ranks, locate(replace(recipe, data=data, **(settings | changes))), tmp_path)
    return run, read_logs(tmp_path / "log")[0]


def parameters(screen):
    """Return (all, trained) as the run printed them."""
    found = re.search(r"model: ([\d,]+) parameters, ([\d,]+) of them trained", screen)
    return tuple(int(number.replace(",", "")) for number in found.groups())


def logits(folder, text="Ada Brandt paid 51 euros."):
    """Return what plain transformers computes with the model in `folder`."""
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokens).logits


@pytest.mark.parametrize(
    ("variant", "changes"),
    tiered(
        (
            ("full", {"precision": "bf16"}),
            ("full", {"layout": Layout(pipeline=2), "deepspeed": "pipeline.json"}),
            ("full", {"layout": Layout(tensor=2), "deepspeed": "zero1.json"}),
            ("full", {"layout": Layout(sequence=2)}),
            ("lora", {"precision": "bf16", "deepspeed": "zero3.json"}),
            ("lora", {"layout": Layout(pipeline=2), "deepspeed": "pipeline.json"}),
            ("dpo_lora", {}),
        ),
        (("full", {"layout": Layout(pipeline=2), "deepspeed": "pipeline.json"}), ("lora", {"precision": "bf16"})),
    ),
)
def test_an_export_holds_what_the_ranks_answered(ranks, tmp_path, samples, variant, changes):
    run, _ = train(ranks, tmp_path, samples, variant, metric="loss" if variant != "dpo_lora" else None, **changes)
    # Whatever the layout, three answers are kept before and after where the metric needs none; stages cannot generate.
    kept = 0 if variant == "dpo_lora" or changes.get("layout", Layout()).pipeline > 1 else 3
    answers = read_jsonl(run.answers)
    assert [row["step"] for row in answers] == [0] * kept + [4] * kept
    assert [row["prompt"] for row in answers[:kept]] == [row["prompt"] for row in answers[kept:]]
    found = certificate.of_folder(run.export)
    assert found.agrees, (str(found), found.causes)
    assert [path.name for path in run.export.iterdir() if path.is_dir()] == ["training"], "no second adapter"
    adapted = variant != "full" and "layout" not in changes
    assert all(("base_logprobs" in text) == adapted for text in certificate.read(run.export)["texts"])


@pytest.mark.every
def test_the_metric_is_measured_on_a_sample_during_training(ranks, tmp_path, samples):
    run, screen = train(ranks, tmp_path, samples, "full", eval_steps=1, eval_examples=3, max_steps=3, save_steps=2)
    rows = read_jsonl(run.evaluations)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [set(row) - {"step", "loss", "cut_off"} for row in rows] == [
        {"exact_match"},
        {"sampled_exact_match"},
        {"sampled_exact_match"},
        {"exact_match"},
    ]
    answered = [row["step"] for row in read_jsonl(run.answers)]
    assert [answered.count(step) for step in range(4)] == [5, 2, 2, 5]  # rank 0 asks two of the three
    assert "held-out, step 1: loss" in screen and "sampled exact match" in screen


def test_a_full_run_leaves_everything_the_format_promises(ranks, tmp_path, samples):
    # Two epochs of two steps.
    epochs = {"max_steps": None, "epochs": 2.0, "packing": False, "global_batch_size": 4 * (LINES // 8 + 1)}
    often = {"save_steps": "epoch", "eval_steps": "epoch"}
    run, screen = train(
        ranks, tmp_path, samples, "full", wandb=Wandb(mode="online", project="checks"), **epochs, **often
    )
    assert not re.findall(r"You are adding a .*", "".join(read_logs(tmp_path / "log"))), "two callbacks of one class"

    engine = json.loads(run.deepspeed.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert "auto" not in run.deepspeed.read_text()
    assert engine["zero_optimization"]["stage"] == 3 and engine["train_batch_size"] == epochs["global_batch_size"]
    environment = read_json(run.environment)
    assert environment["world_size"] == 2 and environment["backend"] == "gloo"
    assert environment["packages"]["deepspeed"] and environment["git_commit"]
    records = read_jsonl(run.metrics)
    assert [row["step"] for row in records] == [1, 2, 3, 4]
    for row in records:
        assert row.keys() >= {"loss", "learning_rate", "grad_norm", "tokens_per_second", "tokens", "seconds"}
        assert row.keys() >= {"data_wait_seconds", "host_peak_gib"}
        assert row["tokens_per_second"] > 0 and 0 <= row["data_wait_seconds"] <= row["seconds"]
    assert [row["step"] for row in read_jsonl(run.evaluations)] == [0, 2, 4]
    assert {path.name for path in run.checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    assert read_json(run.checkpoints / "checkpoint-4" / COMPLETE)["world_size"] == 2
    summary = read_json(run.summary)
    assert summary["metric"] == "exact_match" and summary["logit_difference"] <= 1e-4
    held = [read_json(run.ranks / f"rank-{rank}.json")["layers"] for rank in range(2)]
    weights = pages.find("tiny", "full").model.parameters
    assert [layer["name"] for layer in held[0]][:3] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    planned = state_bytes(weights, TrainingSetup(2, precision="fp32"))
    for layers in held:
        assert sum(layer["optimizer"] for layer in layers) == pytest.approx(planned.optimizer, rel=0.01)
        assert sum(layer["parameters"] for layer in layers) == pytest.approx(planned.parameters, rel=0.01)
    answers = read_jsonl(run.answers)
    assert [row["step"] for row in answers] == [0] * 5 + [4] * 5
    assert [row["prompt"] for row in answers[:5]] == [row["prompt"] for row in answers[5:]]
    held_out = Path(samples("src/deepspeed_recipes/samples/extract/held_out.jsonl")).read_text(encoding="utf-8")
    asked = [json.loads(line)["messages"] for line in held_out.splitlines()[:10:2]]  # rank 0's
    assert [row["expected"] for row in answers[:5]] == [turns[-1]["content"] for turns in asked]
    assert all(turns[-2]["content"] in row["prompt"] for turns, row in zip(asked, answers, strict=False))
    described = read_json(run.data)
    assert described["save_steps"] == 2  # what a restart without a checkpoint goes by
    assert described["training"]["examples"] == described["held_out"]["examples"] == LINES
    assert sum(count for *_, count in described["training"]["lengths"]) == LINES
    assert [learned for _, learned in described["shown"][0]] == [False, True]

    # Online without a key is offline, with a run that can be synced later; rank 1 has none.
    offline = list((run.path / "wandb").glob("offline-run-*"))
    assert len(offline) == 1
    last = screen.strip().splitlines()
    assert last[-1].startswith(f"exact match on {LINES} held-out examples: ")
    assert f"wandb sync {offline[0]}" in screen
    assert any(line.startswith("talk to it") for line in last) and any(line.startswith("export it") for line in last)
    # The Trainer's copy in the last checkpoint is the same model.
    torch.testing.assert_close(logits(run.export), logits(run.checkpoints / "checkpoint-4"))


@pytest.mark.every
def test_the_export_scores_the_same_in_plain_transformers(ranks, tmp_path, samples):
    """Four conversations learned by heart, and as many that were not: the score is neither 0 nor 1."""
    shown = (
        Path(samples("src/deepspeed_recipes/samples/extract/train.jsonl"))
        .read_text(encoding="utf-8")
        .splitlines(keepends=True)
    )
    learned, asked = tmp_path / "learned.jsonl", tmp_path / "asked.jsonl"
    learned.write_text("".join(shown[:4]), encoding="utf-8")
    asked.write_text("".join(shown[:8]), encoding="utf-8")
    data = replace(pages.find("tiny", "full").data, path=str(learned), validation=str(asked))
    recipe = replace(pages.find("tiny", "full"), data=data, max_steps=24, save_steps=0, eval_steps=None)
    run = run_on(
        ranks, locate(replace(recipe, micro_batch_size=1, global_batch_size=2, wandb=Wandb(mode="disabled"))), tmp_path
    )
    ours = read_json(run.summary)["after"]
    command = [sys.executable, str(ROOT / "tests" / "workers" / "plain_score.py"), str(run.export), str(asked)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < ours < 1 and float(done.stdout) == ours


@pytest.mark.parametrize("config", tiered(("zero2.json", "zero3.json"), ("zero2.json",)))
def test_lora_gives_an_adapter_and_on_request_the_merged_model(
    ranks, tmp_path, samples, config, capsys, printed_by, refusal
):
    config = str(ROOT / "configs" / config)
    run, screen = train(
        ranks, tmp_path, samples, "lora", deepspeed=config, learning_rate=1e-1, lora=Lora(rank=4, alpha=8)
    )
    whole, trained = parameters(screen)
    assert 0 < trained < whole / 10
    assert (run.export / "adapter_model.safetensors").exists() and not (run.export / "model.safetensors").exists()
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert export_script.main([str(run.path), "--output", str(merged), "--merge"]) == 0
    assert export_script.main([str(run.path), "--output", str(adapter)]) == 0
    assert (adapter / "adapter_config.json").exists() and not (merged / "adapter_config.json").exists()
    torch.testing.assert_close(logits(merged), logits(adapter), rtol=1e-4, atol=1e-4)
    base = read_json(run.recipe)["model"]["path"]
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    capsys.readouterr()
    assert generate_script.main([str(merged), "Ada paid 51 euros.", "--max-new-tokens", "8"]) == 0
    assert generate_script.main([str(adapter), "Ada paid 51 euros.", "--max-new-tokens", "8"]) == 0
    first, second, third = printed_by(
        "generate", base, "Ada paid 51 euros.", "--adapter", adapter, "--max-new-tokens", "8"
    ).splitlines()
    assert first == second == third
    assert "not empty" in refusal("export", run.path, "--output", merged)


def test_generate_on_a_folder_without_a_model_says_where_the_model_is(tmp_path, refusal):
    (tmp_path / "export").mkdir()
    for words, said in (
        ([str(tmp_path), "Ada?"], "neither a model nor an adapter; a run's model is in its export/"),
        ([str(tmp_path / "nowhere"), "Ada?"], "no such folder"),
        ([pages.find("tiny", "full").model.path, "Ada?", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at"),
    ):
        assert said in refusal("generate", *words)


def test_only_a_single_model_can_be_exported(tmp_path, refusal):
    (tmp_path / "checkpoint-3").mkdir()
    for source, said in ((tmp_path, "name one of them"), (tmp_path / "checkpoint-3", "no .safetensors file")):
        assert said in refusal("export", source, "--output", tmp_path / "out")


@pytest.mark.every
def test_dpo_raises_the_share_of_correctly_ranked_pairs(ranks, tmp_path, samples):
    run, screen = train(ranks, tmp_path, samples, "dpo_lora", max_steps=12, eval_steps=None, global_batch_size=8)
    summary = read_json(run.summary)
    assert summary["metric"] == "preference_accuracy" and summary["after"] > summary["before"]
    assert "rewards/accuracies" in read_jsonl(run.metrics)[-1]
    assert screen.strip().splitlines()[-1].startswith(f"preference accuracy on {LINES} held-out examples: ")
    assert re.search(r"margin -?\d+\.\d\d -> \d+\.\d\d nats$", screen.strip())
    first, *_, last = read_jsonl(run.evaluations)
    assert last["preference_margin"] > first["preference_margin"]
    assert re.search(r"^step 12/12  loss \S+  reward accuracy \d+%  reward margin ", screen, re.MULTILINE)


@pytest.mark.every
def test_continued_pretraining_lowers_the_held_out_loss(ranks, tmp_path, samples):
    run, screen = train(ranks, tmp_path, samples, "pretrain", max_steps=6, learning_rate=1e-3)
    first, *_, last = read_jsonl(run.evaluations)
    assert last["loss"] < first["loss"]
    assert "100% of them" not in screen  # the first token of a document has no label


@pytest.mark.every
def test_a_draft_trains_a_shrunken_model_of_the_same_class(ranks, tmp_path, samples):
    draft = Draft(enabled=True, layers=3, hidden_size=32)
    run, _ = train(ranks, tmp_path, samples, "lora", draft=draft)
    config = read_json(run.draft_model / "config.json")
    assert (config["num_hidden_layers"], config["hidden_size"]) == (3, 32)
    assert (
        config["architectures"]
        == read_json(ROOT / "src/deepspeed_recipes/samples/tiny_model/config.json")["architectures"]
    )
    assert read_json(run.export / "adapter_config.json")["base_model_name_or_path"] == "../draft_model"


@pytest.mark.every
def test_the_size_of_a_checkpoint_is_bounded_from_above_but_not_loosely(ranks, tmp_path, samples):
    for variant, config in (("full", "zero3.json"), ("full", "zero1.json"), ("lora", "zero2.json")):
        folder = tmp_path / f"{variant}-{config}"
        folder.mkdir()
        path = str(ROOT / "configs" / config)
        run, screen = train(ranks, folder, samples, variant, deepspeed=path, max_steps=2)
        total, trained = parameters(screen)
        written = sum(file.stat().st_size for file in (run.checkpoints / "checkpoint-2").rglob("*") if file.is_file())
        assert written <= checkpoint_bytes(total, trained, 4) <= 1.5 * written + 4 * 2**20, (variant, config)


def test_the_names_in_a_run_folder_are_those_that_others_rely_on(tmp_path):
    files = ("recipe.json", "deepspeed.json", "environment.json", "summary.json", "command.txt", "metrics.jsonl")
    names = [*files, "system.jsonl", "report.html", "checkpoints", "export"]
    run = RunFolder(tmp_path)
    keys = ["report_page" if name == "report.html" else name.partition(".")[0] for name in names]
    assert [getattr(run, key) for key in keys] == [tmp_path / name for name in names]


def test_a_recipe_survives_its_file():
    for recipe in pages.listing():
        assert from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe


@pytest.mark.parametrize(
    ("steps", "kind", "said"),
    [
        (
            20,
            "cosine",
            "resuming from step 6 of 20\n"
            "the run had 10 steps: from here on the learning rate follows the cosine schedule of 20\n",
        ),
        (20, "constant", "resuming from step 6 of 20\n"),
        (10, "cosine", "resuming from step 6 of 10\n"),
        (5, "cosine", "all 5 steps are trained: only measuring and exporting\n"),
    ],
)
def test_a_resumed_run_says_where_it_goes_on_and_whether_its_schedule_changed(
    tmp_path, capsys, alone, steps, kind, said
):
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"max_steps": 10}')
    recipe = replace(pages.find("tiny", "full"), max_steps=steps, schedule=Schedule(kind=kind), eval_steps=1)
    training_run.say_updates(recipe, None, 2, checkpoint)
    assert capsys.readouterr().out == f"{steps} steps in all, from a stream\n{said}"
