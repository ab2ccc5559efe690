"""An export appears whole and checked, or not at all."""

import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from deepspeed_recipes.commands.main import run as run_command
from deepspeed_recipes.recipe.errors import UserError
from deepspeed_recipes.recipe.run_folder import (
    CHECK_FAILED,
    COMPLETE,
    RunFolder,
    model_of,
    sizes,
    write_json,
    write_recipe,
)
from deepspeed_recipes.training import distributed, export
from deepspeed_recipes.training import run as training_run
from deepspeed_recipes.training.checkpoint import digests
from deepspeed_recipes.training.data import chat_templates
from deepspeed_recipes.training.model.draft import TINY_MODEL
from deepspeed_recipes.training.model_folder import base_model, expected
from tests.ranks import read_logs
from tests.small import small

WEIGHTS = "model.safetensors"


def write_other_weights(folder):
    """Run with the mistake that the export's weights are not the trained ones; executed on every rank."""
    save = export.save

    def save_others(trainer, target, outline):
        save(trainer, target, outline)
        if distributed.is_first():
            double(target / WEIGHTS)

    export.save = save_others
    training_run.main(folder)


def double(file):
    held = load_file(file)
    name = next(name for name in held if "mlp" in name)
    save_file(held | {name: 2 * held[name]}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_export_that_fails_its_check_never_appears(ranks, tmp_path, model_folder, conversations, refusal, precision):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(model_folder, conversations, max_steps=1, precision=precision))
    assert ranks.run(write_other_weights, str(run.path), world_size=1, log=tmp_path / "log") == [1]
    assert "reloaded logits differ by" in read_logs(tmp_path / "log")[0]
    assert not run.export.exists() and not run.summary.exists()
    for source in (run.path, run.unverified):
        said = refusal("export", source, "--output", tmp_path / "out")
        assert "failed its check" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkpoint(tmp_path):
    """Write a checkpoint's model files with their digests."""
    folder = tmp_path / "run" / "checkpoints" / "checkpoint-5"
    model = export.load_whole(TINY_MODEL, torch.float32)
    model.save_pretrained(folder)
    export.load_tokenizer(TINY_MODEL).save_pretrained(folder)
    found = {name: digests.of_file(folder / name) for name in sizes(folder)}
    complete = {"step": 5, "world_size": 2, "layout": {}, "files": sizes(folder), "digests": found}
    write_json(folder / COMPLETE, complete)
    return folder


def test_a_checkpoint_is_exported_as_it_was_written(checkpoint, tmp_path, refusal):
    assert run_command("export", [str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()
    content = bytearray((checkpoint / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (checkpoint / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS} is damaged" in refusal("export", checkpoint, "--output", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_an_export_that_is_not_as_it_was_written_is_not_copied_and_named_where_it_answers(
    kind, tmp_path, capsys, refusal
):
    source, name = tmp_path / "export", {"whole": WEIGHTS, "adapter": "adapter_model.safetensors"}[kind]
    model = export.load_whole(TINY_MODEL, torch.float32)
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    model.save_pretrained(source)
    export.load_tokenizer(TINY_MODEL).save_pretrained(source)
    write_json(source / base_model.EXPECTED, {"texts": [], **expected.described(source)})
    export.load(source)
    assert run_command("export", [str(source), "--output", str(tmp_path / "out")]) == 0
    assert "not as it was written" not in capsys.readouterr().err
    content = bytearray((source / name).read_bytes())
    content[-1] ^= 1
    (source / name).write_bytes(content)
    for more in ([], ["--merge", "--no-certify"]):
        said = refusal("export", source, "--output", tmp_path / "damaged", *more)
        assert "is not as it was written" in said and said.count("\n") == 1 and not (tmp_path / "damaged").exists()
    export.load(source)
    assert "is not as it was written: the file is damaged or was changed, so its answers" in capsys.readouterr().err


def test_an_export_from_before_a_run_went_on_is_said_to_be_older(checkpoint, capsys):
    run = RunFolder(checkpoint.parents[1])
    run.export.mkdir()
    assert model_of(run) == run.export and not capsys.readouterr().err, "the checkpoint is as old"
    os.utime(checkpoint, (time.time() + 60,) * 2)
    assert model_of(run) == run.export
    said = f"warning: {run.export} is from before this run was resumed; newer: {checkpoint}\n"
    assert capsys.readouterr().err == said
    os.utime(run.export, (time.time() + 120,) * 2)  # as of a copy of the run
    write_json(run.results, {"steps": 2})
    assert model_of(run) == run.export and capsys.readouterr().err == said
    write_json(run.results, {"steps": 5})
    os.utime(checkpoint, (time.time() + 180,) * 2)
    assert model_of(run) == run.export and not capsys.readouterr().err
    write_json(run.results, {"steps": 2})
    write_json(run.summary, {"stopped": None})
    assert model_of(run) == run.export and not capsys.readouterr().err, "the run has finished"


def test_a_checkpoint_is_exported_without_the_model_that_it_began_with(checkpoint, tmp_path, printed_by):
    write_recipe(RunFolder(tmp_path / "run"), small(tmp_path / "moved", tmp_path / "data.jsonl"))
    said = printed_by("export", checkpoint, "--output", tmp_path / "out")
    assert f"warning: the run's model, {tmp_path / 'moved'}, is not on this machine; the export lacks" in said
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (checkpoint / WEIGHTS).read_bytes()


def test_a_copy_has_all_files_of_the_model(tmp_path, capsys):
    source = tmp_path / "ours"
    shutil.copytree(TINY_MODEL, source)
    kept = {
        "modeling_ours.py",
        "vocabulary.tiktoken",
        "LICENSE",
        "parts/rotary.py",
        "additional_chat_templates/a.jinja",
    }
    for name in (*kept, "pytorch_model.bin", "original/all.pth", ".git/HEAD", "global_step3/states.pt", "latest"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    export.write(source, tmp_path / "copy", merge=False)
    copied = {str(file.relative_to(tmp_path / "copy")) for file in (tmp_path / "copy").rglob("*") if file.is_file()}
    assert {name for name in copied if not (TINY_MODEL / name).exists()} - {"README.md"} == kept
    assert {file.name for file in TINY_MODEL.iterdir() if file.is_file()} <= copied
    kinds = "(weights in other formats, and hidden files)"
    assert capsys.readouterr().out == f"left out: original/all.pth, pytorch_model.bin {kinds}\n"
    for name in ("training/notes.txt", "latest_news.md", "checkpoint-names.txt", ".env"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    shutil.rmtree(source / "global_step3")  # no part of a run
    export.write(source, tmp_path / "whole", merge=False)
    for name in ("training/notes.txt", "latest_news.md", "checkpoint-names.txt"):
        assert (tmp_path / "whole" / name).read_text() == name
    assert capsys.readouterr().out.startswith("left out: .env, original/all.pth, ")
    (source / "more.py").symlink_to("absent.py")
    with pytest.raises(UserError, match=r"more\.py: a link to absent.py, which does not exist"):
        export.write(source, tmp_path / "other", merge=False)


def test_weights_without_their_scales_are_not_loaded(tmp_path):
    source = tmp_path / "packed"
    shutil.copytree(TINY_MODEL, source)
    state = load_file(source / WEIGHTS)
    name = "model.layers.0.mlp.down_proj.weight"
    state[f"{name}_scale_inv"] = torch.ones(1)
    save_file(state, source / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"its weights are quantised .*though its config\.json does not say so"):
        export.load(source)


def test_a_model_without_a_tokenizer_is_refused(tmp_path, capsys):
    source = tmp_path / "bare"
    source.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copy2(TINY_MODEL / name, source / name)
    with pytest.raises(UserError, match=r"bare: has no tokenizer, neither tokenizer\.json nor tokenizer\.model; copy"):
        export.load_tokenizer(source)
    assert run_command("generate", [str(source), "Hi?"]) == 2 and "has no tokenizer" in capsys.readouterr().err
    recipe = small(source, tmp_path / "data.jsonl")
    with pytest.raises(UserError, match="has no tokenizer"):
        chat_templates.load_tokenizer(recipe)


def test_a_merged_model_is_reloaded_before_it_appears(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "load_merged", lambda _: export.load_whole(TINY_MODEL, torch.float32))
    write_json(checkpoint / export.ADAPTER, {"base_model_name_or_path": str(TINY_MODEL)})
    export.write(checkpoint, tmp_path / "out", merge=True)
    assert (tmp_path / "out" / WEIGHTS).exists()
    tokenizer = export.load_tokenizer

    def load_and_damage(folder):
        (draft,) = tmp_path.glob("wrong.*/part")
        double(draft / WEIGHTS)
        return tokenizer(folder)

    monkeypatch.setattr(export, "load_tokenizer", load_and_damage)
    with pytest.raises(RuntimeError, match="reloaded logits differ"):
        export.write(checkpoint, tmp_path / "wrong", merge=True)
    assert not (tmp_path / "wrong").exists()


def test_a_kill_leaves_neither_an_export_nor_what_was_written_of_it(checkpoint, tmp_path, monkeypatch):
    """The user's own folders beside it stay, whatever they are called."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "notes.txt").write_text("mine")
    (tmp_path / "out.old").mkdir()
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(export.complete, "of_copy", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    process = os.fork()
    if not process:
        export.write(checkpoint, tmp_path / "out", merge=False)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    monkeypatch.undo()
    until = time.monotonic() + 30
    while set(tmp_path.iterdir()) != before and time.monotonic() < until:
        time.sleep(0.1)
    assert set(tmp_path.iterdir()) == before
    export.write(checkpoint, tmp_path / "out", merge=False)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "out"}
    assert (tmp_path / "out.part" / "notes.txt").read_text() == "mine" and (tmp_path / "out.old").is_dir()


def test_a_run_whose_export_failed_is_not_exported_from_a_checkpoint_unasked(checkpoint, tmp_path, refusal):
    run = RunFolder(tmp_path / "run")
    write_recipe(run, small(TINY_MODEL, tmp_path))
    write_json(run.unverified / CHECK_FAILED, {})
    assert "failed its check" in refusal("export", run.path, "--output", tmp_path / "out")


def test_an_adapter_is_loaded_in_the_precision_that_it_has(tmp_path):
    model = export.load_whole(TINY_MODEL, torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"), autocast_adapter_dtype=False)
    adapted.save_pretrained(tmp_path)
    loaded = export.load(tmp_path, torch.bfloat16)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}


class Unsaved:
    """A tokenizer that is not written: what a library, or a model's own code, raises in `save_pretrained`."""

    def save_pretrained(self, folder):
        raise NotImplementedError("no vocabulary file")


def test_what_cannot_be_saved_is_refused_before_the_first_step(model_folder, tmp_path, monkeypatch):
    run, recipe = RunFolder(tmp_path), small(model_folder, "unread")
    model, tokenizer = export.load_whole(model_folder, torch.float32), export.load_tokenizer(model_folder)
    trainer = SimpleNamespace(context=SimpleNamespace(run=run, recipe=recipe), processing_class=tokenizer)
    export.rehearse(trainer, model)
    assert not list(tmp_path.iterdir()), "nothing stays"
    model.generation_config.temperature = 0.5
    with pytest.raises(UserError, match="its generation settings cannot be saved"):
        export.rehearse(trainer, model)
    model.generation_config.temperature = None
    trainer.processing_class = Unsaved()
    with pytest.raises(UserError, match=r"its tokenizer cannot be saved.*no vocabulary file"):
        export.rehearse(trainer, model)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="the export needs about"):
        export.rehearse(trainer, model)
    assert not list(tmp_path.iterdir())
