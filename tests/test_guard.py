"""NaNs and loss spikes are noticed, named, and never written into a checkpoint."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file, save_file
from torch.utils.data import SequentialSampler
from transformers import TrainerState

from deepspeed_recipes.machine import system
from deepspeed_recipes.recipe import pages
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.recipe import Layout, Schedule
from deepspeed_recipes.recipe.run_folder import (
    REWIND,
    RunFolder,
    append_jsonl,
    newest_checkpoint,
    read_json,
    read_jsonl,
    step_of,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.callbacks import loss_guard
from deepspeed_recipes.training.data import collate
from deepspeed_recipes.training.data.collate import IGNORED
from tests.nan_data import leave_out, write_nan_data, write_nan_model
from tests.ranks import read_logs
from tests.small import in_sub_groups, small
from tests.tiers import tiered
from tests.workers.guard_reads import count_reads

BAD = 5
"""The number of the example with the NaN."""
CASES = {
    **{f"zero{stage}": (f"zero{stage}.json", {}) for stage in range(4)},
    "sub_groups": (in_sub_groups, {}),
    "zero2_offload": ("zero2_offload.json", {}),
    "zero3_offload": ("zero3_offload.json", {}),
    "bf16": ("zero2.json", {"precision": "bf16"}),
    "pipeline": ("pipeline.json", {"layout": Layout(pipeline=2)}),
}
CORE = ("sub_groups",)
EARLIER = {"step": 0, "loss": 0.01, "learning_rate": 1e-2, "grad_norm": 1, "tokens": 1, "seconds": 1}
EARLIER["tokens_per_second"] = 1


@pytest.fixture(scope="module")
def nan_setup(tmp_path_factory, model_folder, conversations):
    """Return a model and data, in which one example has a NaN loss."""
    folder = tmp_path_factory.mktemp("nan")
    return write_nan_model(model_folder, folder / "model"), write_nan_data(conversations, folder / "rows.jsonl", BAD)


def recipe_of(nan_setup, config, **changes):
    recipe = small(*nan_setup, config, save_steps=1, max_steps=8, global_batch_size=2, micro_batch_size=1)
    return replace(recipe, **changes)


def train(ranks, run, recipe, log):
    write_recipe(run, recipe)
    statuses = ranks.run(training_run.main, str(run.path), log=log)
    return statuses, read_logs(log)[0]


@pytest.mark.parametrize("case", tiered(CASES, ("zero0", "pipeline")))
def test_a_damaged_base_is_named_and_not_the_data(ranks, tmp_path, model_folder, conversations, case):
    """Whichever sequences a step has: the weights were not finite before it."""
    config, changes = CASES[case]
    base, broken = tmp_path / "base", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(model_folder, base)
    tensors = load_file(base / "model.safetensors")
    tensors[broken][3] = float("nan")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of((base, conversations), config(tmp_path) if callable(config) else config, **changes)
    statuses, said = train(ranks, run, recipe, tmp_path / "log")
    assert statuses == [2, 2] and not run.metrics.exists(), said
    assert f"{broken} of model.path={base}: holds NaN or infinity before the first step" in said


def test_weights_that_an_update_has_broken_are_named(ranks, tmp_path, model_folder, conversations):
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of((model_folder, conversations), "zero1.json", learning_rate=1e38, schedule=Schedule("constant"))
    statuses, said = train(ranks, run, recipe, tmp_path / "log")
    assert statuses == [2, 2] and "holds NaN or infinity before step" in said and "sequences" not in said[-400:], said


@pytest.mark.parametrize(
    "method, hint", [("sft", "depends on no trained weight"), ("grpo", "all answers of a group got the same")]
)
def test_updates_without_a_gradient_are_named_once(tmp_path, capsys, method, hint):
    recipe = pages.find("tiny", "full" if method == "sft" else method)
    guard = loss_guard.LossGuard(recipe, RunFolder(tmp_path))
    state = TrainerState()
    for step, norm in enumerate((0.5, None, 0.0, 0.0, 0.1), start=1):
        state.global_step = step
        guard.on_log(None, state, None, logs={"loss": 0.0, "grad_norm": norm})
        said = capsys.readouterr().out
        assert (f"warning: step {step}: the gradient norm is 0" in said and hint in said) == (step == 3), (step, said)


@pytest.mark.parametrize("case", tiered(CASES, CORE))
def test_a_nan_stops_the_run_and_names_where_it_came_from(ranks, tmp_path, nan_setup, case):
    config, changes = CASES[case]
    config = config(tmp_path) if callable(config) else config
    run = RunFolder(tmp_path / "run")
    statuses, said = train(ranks, run, recipe_of(nan_setup, config, logging_steps=3, **changes), tmp_path / "log")
    assert statuses == [2, 2], said
    found = re.search(
        r"step (\d+): the loss is not finite on rank ([\d, ]+), sequences ([\d, ]+) of the training data", said
    )
    step, bad_ranks, bad = int(found[1]), found[2].split(", "), [int(number) for number in found[3].split(", ")]
    assert BAD in bad and said.count("is not finite") == 1
    if "layout" not in changes:  # stages share one loss: it comes from any sequence of the step
        assert bad == [BAD] and len(bad_ranks) == 1
    if not changes and config != "zero0.json":
        assert "gradients of group 0 of 2 (" in said
    assert "on_nan=rewind" in said
    checkpoint = newest_checkpoint(run)
    assert step_of(checkpoint) == step - 1
    weights = load_file(checkpoint / "model.safetensors") if case != "pipeline" else {}
    finite = [torch.isfinite(value).all() for name, value in weights.items() if "embed_tokens" not in name]
    assert all(finite) and all(row["step"] < step for row in read_jsonl(run.metrics))


@pytest.mark.parametrize("config", ["zero1.json", pytest.param("zero3.json", marks=pytest.mark.every)])
def test_skip_leaves_the_update_out(ranks, tmp_path, nan_setup, config):
    run = RunFolder(tmp_path / "run")
    recipe = recipe_of(nan_setup, config, on_nan="skip", keep_checkpoints=8)
    statuses, said = train(ranks, run, recipe, tmp_path / "log")
    assert statuses == [0, 0], said
    skipped = [int(step) for step in re.findall(r"step (\d+): the loss is not finite.*: this update is skipped", said)]
    assert len(skipped) == 2  # eight steps of two rows are two epochs of eight
    for step in range(2, 9):
        before, after = (load_file(run.checkpoints / f"checkpoint-{at}/model.safetensors") for at in (step - 1, step))
        assert all(torch.equal(before[name], after[name]) for name in before if "layers.0" in name) == (step in skipped)
    rows = read_jsonl(run.metrics)
    assert all(abs(row["loss"]) < 100 for row in rows)
    assert [row["step"] for row in rows if row["grad_norm"] is None] == skipped


@pytest.mark.every
def test_skip_gives_up_after_ten_updates_in_a_row(ranks, tmp_path, nan_setup, conversations):
    run = RunFolder(tmp_path / "run")
    data = conversations
    for number in range(8):
        data = write_nan_data(data, tmp_path / f"{number}.jsonl", number)
    recipe = small(nan_setup[0], data, "zero1.json", on_nan="skip", max_steps=14)
    statuses, said = train(ranks, run, recipe, tmp_path / "log")
    skipped = [int(step) for step in re.findall(r"step (\d+): the loss is not finite.*: this update is skipped", said)]
    assert skipped == list(range(1, 11)) and statuses == [2, 2], said
    assert re.search(r"step 11: the loss is not finite.*\nInspect these sequences", said)


@pytest.mark.every
def test_skip_is_refused_where_updates_are_not_checked(ranks, tmp_path, nan_setup):
    run = RunFolder(tmp_path / "run")
    statuses, said = train(ranks, run, recipe_of(nan_setup, "zero0.json", on_nan="skip"), tmp_path / "log")
    assert statuses == [2, 2] and "on_nan=skip: without ZeRO" in said and not run.metrics.exists()


@pytest.mark.every
@pytest.mark.parametrize("left", [(BAD,), ()], ids=["left out", "mutation"])
def test_rewind_resumes_without_the_sequence(ranks, tmp_path, nan_setup, conversations, left, monkeypatch):
    """As if the next sequence had been in its place from the start; with the sequence still in, it rewinds again."""
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    recipe = recipe_of(nan_setup, "zero2.json", on_nan="rewind")
    statuses, said = train(ranks, run, recipe, tmp_path / "log")
    assert statuses == [REWIND, REWIND] and "resuming from the newest checkpoint" in said, said
    assert collate.left_out(run) == [BAD] and not run.summary.exists()
    if not left:
        run.left_out.unlink()
        assert train(ranks, run, recipe, tmp_path / "again")[0] == [REWIND, REWIND]
        return
    assert train(ranks, run, recipe, tmp_path / "again")[0] == [0, 0]
    path = leave_out(conversations, tmp_path / "without.jsonl", BAD)
    clean = replace(recipe, data=replace(recipe.data, path=str(path)))
    assert train(ranks, other, clean, tmp_path / "clean")[0] == [0, 0]
    expected, got = (read_jsonl(one.metrics) for one in (other, run))
    assert [row["step"] for row in got] == list(range(1, 9))
    assert [row["loss"] for row in got] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def test_sequences_left_out_are_named_and_not_all_of_them(tmp_path, capsys):
    run = RunFolder(tmp_path)
    collate.leave_out(run, [1, 0])
    collate.leave_out(run, [1])
    assert collate.left_out(run) == [0, 1]
    with pytest.raises(UserError, match="every training sequence"):
        collate.numbered([{}, {}], run)
    assert len(collate.numbered([{}, {}, {}], run)) == 3
    assert f"not trained on: 2 sequences that a rewind has found to be bad, by number in {run.left_out};" in (
        capsys.readouterr().out
    )


def test_the_next_sequence_replaces_one_that_is_left_out():
    sequences = collate.Numbered([{"at": at} for at in range(4)], frozenset({1, 2, 3}))
    assert [sequences[number]["at"] for number in range(4)] == [0, 0, 0, 0] and sequences[1][collate.KEY] == 0
    sequences = collate.Numbered([{"at": at} for at in range(4)], frozenset({1}))
    assert [sequences[number]["at"] for number in range(4)] == [0, 2, 2, 3]


DEVIATION = torch.tensor([2.0, 2.2] * 64).std().item()


@pytest.mark.parametrize(
    ("loss", "earlier", "jumped"),
    [
        (2.1 + 6.01 * DEVIATION, 128, True),
        (2.1 + 5.99 * DEVIATION, 128, False),
        (100.0, 63, False),
        (100.0, 64, True),
        (-100.0, 128, False),
    ],
)
def test_a_spike_is_six_standard_deviations_above_the_mean(alone, tmp_path, capsys, loss, earlier, jumped):
    guard = loss_guard.LossGuard(pages.find("tiny", "full"), RunFolder(tmp_path))
    guard.losses.extend(([2.0, 2.2] * 64)[:earlier])
    guard.on_log(None, TrainerState(), None, {"loss": loss})
    assert ("the loss jumped to" in capsys.readouterr().out) == jumped


@pytest.mark.parametrize("on_spike", tiered(("warn", "stop"), {"warn"}))
def test_a_spike_is_reported(ranks, tmp_path, model_folder, conversations, on_spike):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations, "zero1.json", max_steps=3, on_spike=on_spike))
    for _ in range(128):
        append_jsonl(run.metrics, EARLIER)
    statuses = ranks.run(training_run.main, str(run.path), log=tmp_path / "log")
    said = read_logs(tmp_path / "log")[0]
    assert "step 1: the loss jumped to" in said and "sequences since the last log: 0, 1, 2, 3, 4, 5, 6, 7" in said
    assert statuses == ([0, 0] if on_spike == "warn" else [2, 2]), said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"on_nan": "rewind", "save_steps": 0}, "on_nan=rewind with save_steps=0: .*; set save_steps above 0"),
        ({"on_spike": "rewind", "save_steps": 0}, "on_spike=rewind with save_steps=0: .*; set save_steps above 0"),
        ({"hang_minutes": -1}, "hang_minutes=-1: must be at least 0"),
    ],
)
def test_contradictory_settings_are_refused(model_folder, conversations, changes, said):
    with pytest.raises(UserError, match=said):
        small(model_folder, conversations, **changes)


def test_rewind_needs_numbered_sequences(model_folder, conversations):
    recipe = small(model_folder, conversations, save_steps=1)
    with pytest.raises(UserError, match=r"needs numbered examples"):
        replace(recipe, on_nan="rewind", data=replace(recipe.data, streaming=True))


def test_the_norm_is_logged_where_nothing_is_clipped(ranks, tmp_path, model_folder, conversations):
    norms = {}
    for most in (0.0, 1e6):
        run = RunFolder(tmp_path / str(most))
        recipe = small(model_folder, conversations, "zero0.json", max_grad_norm=most, max_steps=2)
        assert train(ranks, run, recipe, tmp_path / "log")[0] == [0, 0]
        norms[most] = [record["grad_norm"] for record in read_jsonl(run.metrics)]
    assert norms[0.0] == norms[1e6] and all(norms[0.0])


@pytest.mark.every
def test_the_guard_reads_nothing_from_the_device(ranks, tmp_path, model_folder, conversations):
    """As many values are fetched with it as without, and one more read per step would be noticed."""
    counts = {}
    for mode in ("with", "without", "curious"):
        run = RunFolder(tmp_path / mode)
        write_recipe(run, small(model_folder, conversations, "zero2.json", logging_steps=3))
        ranks.check(count_reads, str(run.path), mode, log=tmp_path / f"{mode}.log")
        counts[mode] = read_json(run.path / "reads.json")
    assert counts["with"] == counts["without"]
    assert counts["curious"] == counts["with"] + 6


def test_memory_is_checked_before_a_save(monkeypatch):
    assert system.gathered_bytes(100, 100, 2, 3) == 200 and system.gathered_bytes(100, 10, 2, 3) == 20
    assert system.gathered_bytes(100, 100, 2, 2) == 0
    free = system.free_memory()
    assert 2**26 < free < 2**45
    system.check_memory(2**20, "a checkpoint")
    monkeypatch.setattr(system, "free_memory", lambda: 2**30)
    with pytest.raises(UserError, match=r"gathers 2\.00 GiB in host memory, but only 1\.00 GiB is free"):
        system.check_memory(2**31, "a checkpoint")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 8])
def test_ranks_share_an_epoch_without_repeating_a_sequence(count, size, ranks):
    batches = collate.EvenBatches(SequentialSampler(range(count)), size, ranks)
    shares = [[*BatchSamplerShard(batches, ranks, rank, even_batches=False)] for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1, "ranks that make fewer passes would leave the others waiting"
    numbers = [number for share in shares for batch in share for number in batch]
    assert sorted(number for number in numbers if number >= 0) == [*range(count)]
    sequences = collate.Numbered([{"at": at} for at in range(count)], frozenset({0} if count > 1 else ()))
    for filler in (number for number in numbers if number < 0):
        assert sequences[filler][collate.FILLER] and sequences[filler]["at"] not in sequences.bad


def test_a_filler_counts_nothing():
    with_numbers = collate.WithNumbers(lambda _: {"labels": torch.tensor([[1, 2]]), "tokens": 2})
    counted, filler = (with_numbers([{collate.KEY: 0, **more}]) for more in ({}, {collate.FILLER: True}))
    assert counted["tokens"] == 2 and collate.FILLER not in counted
    assert filler["tokens"] == 0 and (filler["labels"] == IGNORED).all() and filler[collate.FILLER]
