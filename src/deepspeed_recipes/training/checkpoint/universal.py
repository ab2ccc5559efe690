"""Converts a checkpoint for another number of ranks to DeepSpeed's universal form, before any rank starts.

Under ZeRO-1 to 3 each rank writes its shard of the optimizer's states, so the files of N ranks fit N ranks only. The
universal form has one file per weight and state, from which any number of ranks can read its shards. The launcher
refuses in milliseconds a checkpoint that cannot be converted; the conversion is a separate process.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ...machine import children
from ...machine.system import check_disk
from ...recipe import deepspeed_file
from ...recipe.bounds import shown
from ...recipe.compatibility import EXPERT_COUNTS, refusal
from ...recipe.deepspeed_file import DeepSpeedFile
from ...recipe.errors import UserError, counted
from ...recipe.files import Json, text_of
from ...recipe.limits import as_overrides
from ...recipe.project import python_path
from ...recipe.recipe import Layout, Recipe
from ...recipe.run_folder import (
    COMPLETE,
    RunFolder,
    best_checkpoint,
    newest_checkpoint,
    read_json,
    read_recipe,
    write_json,
)
from . import digests

MARKER = "latest_universal"
"""DeepSpeed writes this file last; it names the folder of the complete universal form."""
CONVERTED = "universal.json"
"""Written after MARKER: the digests of the universal form's files."""
DIMENSIONS = (
    *("model_type", "vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "head_dim"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "intermediate_size", "n_inner"),
    *(*EXPERT_COUNTS, "moe_intermediate_size"),
)
"""Keys of a config.json that define the architecture, under the names that model families give them."""


def check(recipe: Recipe, run: RunFolder, file: DeepSpeedFile, world_size: int) -> None:
    """Refuse to resume with settings that the run's newest checkpoint does not fit and cannot be converted to.

    `recipe` is as it is about to run on `world_size` ranks; the run's folder still holds the old one.
    """
    checkpoint = newest_checkpoint(run)
    assert checkpoint, "call this only for a run that has a complete one"
    complete, saved_file = read_json(checkpoint / COMPLETE), deepspeed_file.read(run.deepspeed)
    if saved_file.has_zenflow:
        # `test_zenflow_checkpoints_lose_pending_updates` fails once this can be removed.
        raise UserError(
            f"{checkpoint} was written with ZenFlow, whose pending updates DeepSpeed does not save; start a new run "
            f"from its weights: without --resume, with model.path={checkpoint}."
        )
    if file.stage != saved_file.stage:
        raise UserError(
            f"deepspeed={Path(recipe.deepspeed).name}: {checkpoint} was written under ZeRO-{saved_file.stage}, and "
            f"DeepSpeed cannot load it under another; use a file with stage {saved_file.stage}."
        )
    saved, asked = Layout(**complete["layout"]), recipe.layout
    changed = {
        "pipeline": saved.pipeline != asked.pipeline,
        # AutoEP's experts have other parameters than whole ones.
        "expert": (saved.expert > 1) != (asked.expert > 1),
        # A checkpoint of whole matrices does not say how to split them; and only ZeRO's states can be converted.
        "tensor": saved.tensor == 1 < asked.tensor or (not file.stage and saved.tensor != asked.tensor),
    }
    if name := next((name for name, is_so in changed.items() if is_so), None):
        size = getattr(saved, name)
        raise refusal("layout of a checkpoint", name=name, size=getattr(asked, name), checkpoint=checkpoint, saved=size)
    _check_file(recipe, file, saved_file, checkpoint)
    _check_model(recipe, read_recipe(run), checkpoint)
    why = None  # what the universal form cannot hold
    kind = saved_file.optimizer or recipe.optimizer
    if saved_file.offload_optimizer == "nvme":
        why = "states on NVMe (offload_optimizer)"
    elif kind.lower() not in ("adam", "adamw"):
        why = f"states of {kind} (only Adam's)"
    elif saved.tensor > 1 and (file.stage == 3 or saved.pipeline > 1 or recipe.lora is not None):
        # It holds split matrices only below ZeRO-3, where AutoTP has split and described them.
        # `test_deepspeed_does_not_join_split_matrices` fails once this can be removed.
        why = "matrices that are split under ZeRO-3, in a pipeline or next to adapters"
    if why and is_needed(asked, run, world_size):
        raise UserError(
            f"{checkpoint} was written by {complete['world_size']} ranks, and DeepSpeed cannot convert {why} "
            f"for another number; use --gpus {complete['world_size']} {as_overrides(saved)}".rstrip()
            + "."
        )


def _check_file(recipe: Recipe, new: DeepSpeedFile, old: DeepSpeedFile, checkpoint: Path) -> None:
    """Refuse another content of the DeepSpeed file, whatever its name; `old` is what the engine got, without "auto"."""
    for block in ("bf16", "data_types"):  # the dtypes of weights, gradients and states
        # `precision` fills `enabled`, and is compared by itself.
        now, then = (
            {key: value for key, value in (file.content.get(block) or {}).items() if key != "enabled"}
            for file in (new, old)
        )
        if now != then:
            raise UserError(
                f"deepspeed={new.name}: its {block} block differs from that with which {checkpoint} was written "
                f"({shown(then or 'none')}); use that block, or start a new run without --resume."
            )
    # AutoEP's experts have groups of their own, so the file's optimizer is not used.
    kind, before = ((recipe.layout.expert == 1 and file.optimizer) or recipe.optimizer for file in (new, old))
    if kind.lower() != before.lower():
        raise UserError(
            f"deepspeed={new.name}: its optimizer is {kind}, and {checkpoint} holds the states of {before}; use the "
            "file with which the run started, or start a new run without --resume."
        )


def _check_model(recipe: Recipe, saved: Recipe, checkpoint: Path) -> None:
    draft = asdict(saved.draft)
    settings = {
        **{f"draft.{name}": (asked, draft[name]) for name, asked in asdict(recipe.draft).items()},
        "precision": (recipe.precision, saved.precision),
        "layer_decay": (recipe.layer_decay, saved.layer_decay),  # a group of states per layer, or one for all
        "model.train_vision": (recipe.model.train_vision, saved.model.train_vision),
        "model.new_tokens": (recipe.model.new_tokens, saved.model.new_tokens),
        "train": (recipe.train, saved.train),
        "freeze": (recipe.freeze, saved.freeze),
        "optimizer": (recipe.optimizer, saved.optimizer),
    }
    if recipe.picks and saved.steps_between_evaluations:  # which have to be of the same examples
        settings["eval_examples"] = (recipe.eval_examples, saved.eval_examples)
    for key, (asked, held) in settings.items():
        if asked != held:
            raise UserError(
                f"{key}={shown(asked)}: {checkpoint} holds weights and states of a run with {shown(held)}; leave it "
                "unchanged, or start a new run without --resume."
            )
    if (recipe.lora is None) != (saved.lora is None):
        held = "adapters" if saved.lora else "all weights, without adapters"
        raise UserError(f"lora: {checkpoint} holds {held}; use the variant of that run, or start a new one.")
    shape = ("rank", "alpha", "target_modules", "target_parameters", "modules_to_save")
    for name in (*shape, "dora", "rslora", "init", "plus_ratio"):
        now, then = (getattr(one.lora, name, None) for one in (recipe, saved))
        if now != then:
            raise UserError(f"lora.{name}={now}: {checkpoint} holds adapters with {then}; leave it unchanged.")
    if recipe.draft.enabled:
        return
    files = [checkpoint / "config.json", Path(saved.model.path, "config.json")]
    then = next((dimensions(read_json(file)) for file in files if file.exists()), {})
    for name, size in dimensions(read_json(Path(recipe.model.path, "config.json"), {})).items():
        if then.get(name, size) != size and not (name == "vocab_size" and recipe.model.new_tokens):
            raise UserError(
                f"model.path={recipe.model.path}: its {name} is {size}, and {checkpoint} is of a model with "
                f"{then[name]}; resume with the model that the run started with."
            )


def dimensions(config: Json) -> Json:
    """Return the values in a config.json that define the architecture."""
    text = text_of(config)
    return {name: text[name] for name in DIMENSIONS if text.get(name) is not None}


def is_needed(layout: Layout, run: RunFolder, world_size: int, checkpoint: Path | None = None) -> bool:
    """Return whether `world_size` ranks in `layout` can only load a checkpoint of the run in its universal form.

    `checkpoint` is the newest if it is None.

    Without ZeRO every rank has all states. DeepSpeed treats sequence-parallel ranks as data-parallel, so their number
    alone changes nothing.
    """
    checkpoint = checkpoint or newest_checkpoint(run)
    if checkpoint is None or not deepspeed_file.read(run.deepspeed).stage:
        return False
    complete = read_json(checkpoint / COMPLETE)
    saved = Layout(**complete["layout"])
    return (complete["world_size"], saved.tensor, saved.expert) != (world_size, layout.tensor, layout.expert)


def convert_needed(recipe: Recipe, run: RunFolder, world_size: int, checkpoint: Path) -> None:
    """Convert `checkpoint`, and the best one that `keep_best` may export, if `world_size` ranks need it."""
    best = best_checkpoint(run, recipe) if recipe.keep_best else None
    for one in dict.fromkeys(filter(None, (checkpoint, best))):
        if is_needed(recipe.layout, run, world_size, one):
            written_by = read_json(one / COMPLETE)["world_size"]
            print(
                f"{one} was written by {counted(written_by, 'rank')}; converting it for {counted(world_size, 'rank')}",
                flush=True,
            )
            convert(one)


def convert(checkpoint: Path) -> None:
    """Write the universal form into `checkpoint`, in one process, unless an intact one exists."""
    if (checkpoint / CONVERTED).exists() and digests.damaged(checkpoint, CONVERTED) is None:
        return
    for name in (CONVERTED, MARKER):
        (checkpoint / name).unlink(missing_ok=True)
    source = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    target = source.with_name(source.name + "_universal")
    shutil.rmtree(target, ignore_errors=True)
    # An upper bound. The states exist twice, in pieces and joined; ZeRO-3 also keeps one rank's file, and ZeRO-1 and 2
    # write in fp32 what only the module's 16-bit state holds.
    states = [file.stat().st_size for file in source.glob("*_optim_states.pt")]
    weights = [file.stat().st_size for file in source.glob("*_model_states.pt")]
    most = int(1.1 * (2 * sum(states) + max(states, default=0) + 3 * sum(weights)))
    check_disk(checkpoint, most, "the conversion for another number of ranks")
    command = [sys.executable, "-m", __name__]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    # One worker each: with several workers DeepSpeed holds as many shares in memory at once.
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    if read_json(checkpoint / COMPLETE)["layout"]["tensor"] == 1:
        command.append("--inject_missing_state")  # with split matrices a missing description must stay an error
    pipe = subprocess.PIPE
    done = children.run(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | python_path(os.environ))
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        reason = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == 2:
            raise UserError(reason)
        written_by = read_json(checkpoint / COMPLETE)["world_size"]
        raise UserError(f"{checkpoint}: DeepSpeed cannot convert it: {reason}\nUse --gpus {written_by}.")
    written = [checkpoint / MARKER, *(path for path in sorted(target.rglob("*")) if path.is_file())]
    digests.flush(written)
    found = {str(path.relative_to(checkpoint)): digests.of_file(path) for path in written}
    write_json(checkpoint / CONVERTED, {"digests": found})


def main() -> int:
    """Run DeepSpeed's conversion without executing code hidden in a checkpoint's pickles; return the exit status.

    python -m deepspeed_recipes.training.checkpoint.universal --input_folder CHECKPOINT/global_stepN --output_folder ...
    """
    # Not at the top: the launcher imports this module without torch and DeepSpeed.
    from deepspeed.checkpoint import ds_to_universal

    from . import save

    arguments = ds_to_universal.parse_arguments()
    save.load_only_data()
    try:
        with save.refusing_code(Path(arguments.input_folder).parent):
            ds_to_universal.main(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
