"""A run that resumes with another number of ranks logs what the uninterrupted one logs."""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_recipes.commands import launch
from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.project import CONFIGS
from deepspeed_recipes.recipe.recipe import Layout, Lora, Schedule
from deepspeed_recipes.recipe.run_folder import (
    COMPLETE,
    RunFolder,
    forget_after,
    newest_checkpoint,
    read_json,
    read_jsonl,
    read_recipe,
    sizes,
    starting_recipe,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training import upstream
from deepspeed_recipes.training.checkpoint import digests, universal
from tests.ranks import read_logs, run_on
from tests.small import in_round_robin, in_sub_groups, small
from tests.tiers import tiered

STEPS = 5
"""Two and a half epochs: a run that ends within an epoch could go on in it."""
LORA = Lora(rank=4, alpha=8)
CASES = {
    "zero0": ("zero0.json", {}),
    "zero1": ("zero1.json", {}),
    "zero2": ("zero2.json", {}),
    "zero3": ("zero3.json", {}),
    "sub_groups": (in_sub_groups, {}),
    "round_robin": (in_round_robin, {}),
    "lora": ("zero2.json", {"lora": LORA}),
    "lora_zero3": ("zero3.json", {"lora": LORA}),
    "dora": ("zero3_adapters.json", {"lora": replace(LORA, dora=True)}),
    "zero2_offload": ("zero2_offload.json", {}),
    "zero3_offload": ("zero3_offload.json", {}),
    "zero3_hpz": ("zero3_hpz.json", {}),
    "pipeline": ("pipeline.json", {"layout": Layout(pipeline=2)}),
    "sequence": ("zero3.json", {"layout": Layout(sequence=2)}),
    "tensor": ("zero1.json", {"layout": Layout(tensor=2)}),
    "tensor_zero0": ("zero0.json", {"layout": Layout(tensor=2)}),
}
CHANGES = [
    *(("zero0", 2, 1), ("zero0", 2, 4)),
    *(("zero1", 2, 1), ("zero1", 2, 4), ("zero1", 1, 2), ("zero1", 4, 2)),
    *(("zero2", 2, 1), ("zero2", 2, 4)),
    *(("zero3", 2, 1), ("zero3", 2, 4), ("zero3", 1, 2), ("zero3", 4, 2), ("sub_groups", 2, 1), ("sub_groups", 2, 4)),
    *(("round_robin", 2, 1), ("round_robin", 2, 4)),
    *(("lora", 2, 1), ("lora", 2, 4), ("lora_zero3", 2, 1), ("lora_zero3", 2, 4), ("dora", 2, 1)),
    *(("zero2_offload", 2, 1), ("zero3_offload", 2, 1), ("zero3_hpz", 2, 4)),
    *(("pipeline", 2, 4), ("pipeline", 4, 2), ("sequence", 2, 4), ("tensor", 2, 4), ("tensor_zero0", 2, 4)),
]
"""What, written by how many ranks, resumed by how many."""
CORE = {("round_robin", 2, 1)}
"""Those that `make test` tries; `make test-all` tries them all."""


def recipe_of(case, model_folder, conversations, folder):
    config, changes = CASES[case]
    config = config(folder) if callable(config) else config
    recipe = small(model_folder, conversations, config, max_steps=STEPS, save_steps=3, **changes)
    # In batches that differ, at rates that differ: a wrong order of the data would show.
    return replace(recipe, global_batch_size=4, micro_batch_size=1, schedule=Schedule("cosine", 0.1))


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory, model_folder, conversations):
    """Return the uninterrupted run of a case by `written_by` ranks, trained once."""
    done = {}

    def of(case, written_by):
        if (case, written_by) not in done:
            folder = tmp_path_factory.mktemp("whole")
            recipe = recipe_of(case, model_folder, conversations, folder)
            done[case, written_by] = run_on(ranks, recipe, folder, written_by)
        return done[case, written_by]

    return of


def stopped_after_three(whole, folder):
    """Return a copy of the run as it was after its third step."""
    run = RunFolder(folder / "resumed")
    shutil.copytree(whole.path, run.path)
    shutil.rmtree(run.checkpoints / f"checkpoint-{STEPS}")
    shutil.rmtree(run.export)
    run.summary.unlink()
    forget_after(run, newest_checkpoint(run))
    return run


@pytest.mark.parametrize(
    ("case", "written_by", "resumed_by"),
    tiered(CHANGES, CORE),
)
def test_same_losses_with_another_number_of_ranks(ranks, tmp_path, whole, case, written_by, resumed_by):
    run = stopped_after_three(whole(case, written_by), tmp_path)
    resume(ranks, run, resumed_by, tmp_path / "log")
    agree(run, whole(case, written_by))


@pytest.mark.every
@pytest.mark.parametrize(("case", "converted"), [("sequence", False), ("tensor", True)])
def test_same_losses_in_another_layout(ranks, tmp_path, whole, case, converted):
    """Sequence-parallel ranks are data-parallel to DeepSpeed: as many ranks can load the states."""
    run = stopped_after_three(whole(case, 2), tmp_path)
    write_recipe(run, replace(read_recipe(run), layout=Layout()))
    assert universal.is_needed(Layout(), run, 2) == converted
    resume(ranks, run, 2, tmp_path / "log")
    agree(run, whole(case, 2))


def resume(ranks, run, world_size, log):
    """Resume a run as the launcher does."""
    if universal.is_needed(starting_recipe(run).layout, run, world_size):
        universal.convert(newest_checkpoint(run))
    ranks.check(training_run.main, str(run.path), world_size=world_size, log=log)


def agree(run, whole):
    """Fail unless every step is that of the uninterrupted run."""
    expected, got = read_jsonl(whole.metrics), read_jsonl(run.metrics)
    assert [row["step"] for row in got] == list(range(1, STEPS + 1))
    for ours, theirs in zip(got, expected, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (ours["step"], key)
        assert ours["tokens"] == theirs["tokens"]


def forgetful(folder):
    """Run without the workarounds for DeepSpeed's loading; executed on every rank."""
    upstream.take_update_settings = lambda optimizer, scheduler, asked: None
    upstream.separate_step_counters = lambda engine: None
    training_run.main(folder)


def reordered(folder):
    """Run with a loader that forgets where the run was; executed on every rank."""
    import transformers.trainer as trainer

    trainer.skip_first_batches = lambda loader, count: loader
    training_run.main(folder)


@pytest.mark.every
@pytest.mark.parametrize("mistake", [forgetful, reordered])
def test_a_wrong_resume_is_noticed(ranks, tmp_path, whole, mistake):
    run = stopped_after_three(whole("zero3", 2), tmp_path)
    universal.convert(newest_checkpoint(run))
    ranks.check(mistake, str(run.path), world_size=1, log=tmp_path / "log")
    steps = zip(read_jsonl(run.metrics), read_jsonl(whole("zero3", 2).metrics), strict=True)
    differences = [abs(got[key] / expected[key] - 1) for got, expected in steps for key in ("loss", "grad_norm")]
    assert max(differences) > 1e-4, "ten times what `agree` allows"


def refusal(run, capsys, *arguments):
    """Return what the launcher answers to a resume, and check that it has changed nothing."""
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    assert run_command("launch", ["tiny", "full", "--resume", "--output-dir", str(run.path), *arguments]) == 2
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_what_cannot_be_resumed_is_refused_before_anything_starts(tmp_path, whole, capsys):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    engine = read_json(run.deepspeed)
    wider = tmp_path / "wider"
    shutil.copytree(read_recipe(run).model.path, wider)
    write_json(wider / "config.json", read_json(wider / "config.json") | {"hidden_size": 128})
    assert "its hidden_size is 128, and" in refusal(run, capsys, f"model.path={wider}", "--gpus", "2")
    assert "use a file with stage 2" in refusal(run, capsys, "deepspeed=zero3.json", "--gpus", "1")
    assert "lora: " in refusal(run, capsys, "lora.rank=8", "--gpus", "2")
    assert "of a run with adamw; leave" in refusal(run, capsys, "optimizer=adamw_8bit", "--gpus", "2")
    assert "draft.enabled=true" in refusal(run, capsys, "--draft", "--gpus", "2")
    assert "use layout.tensor=1" in refusal(run, capsys, "layout.tensor=2", "--gpus", "2")
    staged = ["layout.pipeline=2", "deepspeed=pipeline.json", "--gpus", "2"]
    write_json(run.deepspeed, {"zero_optimization": {"stage": 1}})
    error = refusal(run, capsys, *staged)
    assert "was written with 1, and DeepSpeed cannot convert that; use layout.pipeline=1" in error
    write_json(run.deepspeed, engine)
    lion, own = {"optimizer": {"type": "Lion", "params": {}}}, tmp_path / "lion.json"
    write_json(own, read_json(CONFIGS / "zero2.json") | lion)
    write_json(run.deepspeed, engine | lion)
    another = refusal(run, capsys, f"deepspeed={own}", "--gpus", "4")
    assert "states of Lion (only Adam's) for another number; use --gpus 2" in another
    zero = engine["zero_optimization"] | {"offload_optimizer": {"device": "nvme"}}
    write_json(run.deepspeed, engine | {"zero_optimization": zero})
    assert "states on NVMe (offload_optimizer) for another number; use --gpus 2" in refusal(run, capsys, "--gpus", "4")
    write_json(run.deepspeed, engine | {"zero_optimization": engine["zero_optimization"] | {"zenflow": {}}})
    assert "was written with ZenFlow" in refusal(run, capsys, "--gpus", "2")


def test_an_ordinary_resume_is_not_refused(tmp_path, whole):
    run = stopped_after_three(whole("lora", 2), tmp_path)
    for ranks_ in ("1", "2", "4"):
        arguments = ["tiny", "full", "--resume", "--output-dir", str(run.path), "--gpus", ranks_, "--dry-run"]
        assert launch.main(arguments) == 0


@pytest.mark.every
def test_disk_space_is_checked_before_the_conversion_and_suffices(tmp_path, whole, monkeypatch):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    checkpoint = newest_checkpoint(run)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="for another number of ranks needs about"):
        universal.convert(checkpoint)
    assert not (checkpoint / universal.MARKER).exists()
    monkeypatch.undo()
    needed: list[int] = []
    monkeypatch.setattr(universal, "check_disk", lambda _, size, what: needed.append(size))
    # What an interrupted conversion has left is in nobody's way.
    (checkpoint / "global_step3_universal").mkdir()
    universal.convert(checkpoint)
    written = sum(path.stat().st_size for path in (checkpoint / "global_step3_universal").rglob("*"))
    assert needed[0] / 4 < written < needed[0]


def test_split_matrices_that_cannot_be_joined_are_refused(tmp_path, whole, capsys):
    run = stopped_after_three(whole("zero3", 2), tmp_path)
    complete = newest_checkpoint(run) / COMPLETE
    write_json(complete, read_json(complete) | {"layout": asdict(Layout(tensor=2))})
    write_recipe(run, replace(read_recipe(run), layout=Layout(tensor=2)))
    said = refusal(run, capsys, "--gpus", "4")
    assert "cannot convert matrices that are split under ZeRO-3" in said and "use --gpus 2 layout.tensor=2." in said


def exported(run):
    """Return the files of an export."""
    return sorted(str(path.relative_to(run.export)) for path in run.export.rglob("*") if path.is_file())


@pytest.mark.parametrize("case", tiered(["zero2", "zero3", "pipeline"], {"zero2"}))
def test_a_run_that_was_killed_after_its_last_step_is_only_finished(ranks, tmp_path, whole, case):
    done, run = whole(case, 2), RunFolder(tmp_path / "killed")
    shutil.copytree(done.path, run.path)
    shutil.rmtree(run.export)
    run.summary.unlink()
    ranks.check(training_run.main, str(run.path), log=tmp_path / "log")
    assert f"all {STEPS} steps are trained" in read_logs(tmp_path / "log")[0]
    assert run.metrics.read_text() == done.metrics.read_text()
    assert read_json(run.summary)["steps"] == STEPS
    written = exported(done)
    assert exported(run) == written
    for name in written:
        assert (run.export / name).read_bytes() == (done.export / name).read_bytes(), name


@pytest.mark.parametrize("case", tiered(["zero2", "zero3", "pipeline"], {"zero2"}))
def test_every_file_of_a_checkpoint_has_its_digest(whole, case):
    checkpoint = newest_checkpoint(whole(case, 2))
    complete = read_json(checkpoint / COMPLETE)
    assert set(complete["digests"]) == set(complete["files"]) == set(sizes(checkpoint)) - {COMPLETE}
    assert len(complete["files"]) > 5 and digests.damaged(checkpoint) is None


@pytest.mark.every
def test_a_damaged_conversion_is_repeated(tmp_path, whole):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    checkpoint = newest_checkpoint(run)
    universal.convert(checkpoint)
    state = next((checkpoint / "global_step3_universal").rglob("exp_avg.pt"))
    written, content = state.stat().st_mtime_ns, state.read_bytes()
    universal.convert(checkpoint)
    assert state.stat().st_mtime_ns == written
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    universal.convert(checkpoint)
    assert digests.damaged(checkpoint, universal.CONVERTED) is None


@pytest.mark.every
def test_a_run_does_not_resume_on_other_data(ranks, tmp_path, whole):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    recipe, other = read_recipe(run), tmp_path / "other.jsonl"
    other.write_text(Path(recipe.data.path).read_text().replace("please", "Please"))
    write_recipe(run, replace(recipe, data=replace(recipe.data, path=str(other))))
    assert ranks.run(training_run.main, str(run.path), log=tmp_path / "refused") == [2, 2]
    said = read_logs(tmp_path / "refused")[0]
    assert "was trained with other data: resuming would not continue it; data.changed=true accepts it." in said
    write_recipe(run, replace(recipe, data=replace(recipe.data, path=str(other), changed=True)))
    ranks.check(training_run.main, str(run.path), log=tmp_path / "accepted")


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def poison(checkpoint, pattern, marker):
    """Hide code in a file of a checkpoint, which loads as before otherwise."""
    file = sorted(checkpoint.glob(pattern))[-1]
    held = torch.load(file, weights_only=False)
    torch.save(held | {"poison": Attack(marker)}, file)
    complete, name = read_json(checkpoint / COMPLETE), str(file.relative_to(checkpoint))
    complete["files"][name], complete["digests"][name] = file.stat().st_size, digests.of_file(file)
    write_json(checkpoint / COMPLETE, complete)


@pytest.mark.parametrize(
    ("case", "file"),
    tiered(
        [("zero2", "*/*_optim_states.pt"), ("zero2", "rng_state_1.pth"), ("zero3", "*/*_model_states.pt")],
        {("zero2", "*/*_optim_states.pt")},
    ),
)
def test_a_poisoned_checkpoint_runs_no_code(ranks, tmp_path, whole, case, file):
    run = stopped_after_three(whole(case, 2), tmp_path)
    poison(newest_checkpoint(run), file, tmp_path / "attacked")
    processes = ranks.start(training_run.main, str(run.path), log=tmp_path / "log")
    for process in processes:
        process.join(120 if process is processes[1] else 0)
    processes[0].kill()
    assert processes[1].exitcode == 2
    said = read_logs(tmp_path / "log")[1]
    assert "not loaded: one of its files contains" in said and "mkdir" in said and "Traceback" not in said
    assert not (tmp_path / "attacked").exists()


@pytest.mark.every
def test_a_poisoned_checkpoint_runs_no_code_while_it_is_converted(tmp_path, whole):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    poison(newest_checkpoint(run), "global_step3/*_optim_states.pt", tmp_path / "attacked")
    with pytest.raises(UserError, match=r"one of its files contains \w+.mkdir, which is code") as refused:
        universal.convert(newest_checkpoint(run))
    assert "\n" not in str(refused.value) and not (tmp_path / "attacked").exists()


def test_only_the_command_line_lets_a_model_run_its_own_code(tmp_path, whole, capsys):
    run = stopped_after_three(whole("zero2", 2), tmp_path)
    held = read_recipe(run)
    write_recipe(run, replace(held, model=replace(held.model, trust_remote_code=True)))
    arguments = ["tiny", "full", "--resume", "--output-dir", str(run.path), "--gpus", "2", "--dry-run", "full"]
    for given, trusted in (([], False), (["model.trust_remote_code=true"], True)):
        assert launch.main([*arguments, *given]) == 0
        assert f'"trust_remote_code": {str(trusted).lower()}' in capsys.readouterr().out
