"""What can be known to be wrong before a process is started: standard library only, so it costs milliseconds."""

import contextlib
import difflib
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

from recipes.spec.errors import UserError
from recipes.spec.pages import ROOT
from recipes.spec.recipe import Recipe, names
from recipes.spec.run_folder import read_json
from recipes.training import files, rows

GIB = 2**30
HEADS = 4
"""Attention heads of a draft; as many query heads share a key/value head as in the original."""
EXPERTS = 4
"""Of a draft's mixture."""
STREAMED = 1000
"""How many examples of a streamed file are checked before the launch."""


def locate(recipe: Recipe, elsewhere: str | None = None) -> Recipe:
    """Return the recipe with its local paths made absolute, so that every rank and a later resume find them.

    A path is looked up from the current folder first, then from the project's root; the DeepSpeed file also in
    `configs/`. What is found nowhere and looks like a Hub id stays as it is, and so does what lies under `elsewhere`,
    a folder of another machine's.

    Raises:
        UserError: a file that does not exist, or a folder that holds no model.
    """
    data = replace(
        recipe.data,
        path=_each_local("data.path", recipe.data.path, elsewhere),
        validation=recipe.data.validation and _each_local("data.validation", recipe.data.validation, elsewhere),
    )
    model = replace(recipe.model, path=_local("model.path", recipe.model.path, elsewhere))
    if Path(model.path).exists() and not Path(model.path, "config.json").is_file():
        raise UserError(
            f"model.path={recipe.model.path}: no config.json in it. It has to be a Hugging Face folder; of a run of "
            "yours take its export/, and of an adapter what export.py --merge makes."
        )
    if model.chat_template not in ("auto", "chatml"):
        model = replace(model, chat_template=_local("model.chat_template", model.chat_template, elsewhere))
    deepspeed = _local("deepspeed", recipe.deepspeed, None, ROOT / "configs")
    return replace(recipe, data=data, model=model, deepspeed=deepspeed)


def _each_local(key: str, paths: str, elsewhere: str | None) -> str:
    return ",".join(_local(key, path, elsewhere) for path in names(paths))


def _local(key: str, path: str, elsewhere: str | None, *folders: Path) -> str:
    if elsewhere and Path(path).is_relative_to(elsewhere):
        return path
    for folder in (Path(), *folders, ROOT):
        if (folder / path).exists():
            return str((folder / path).resolve())
    looks_like_hub_id = (
        path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix[1:].isalpha()
    )
    if key in ("model.path", "data.path") and looks_like_hub_id:
        return path
    raise UserError(f"{key}={path}: no such file or folder.{_nearest(path, folders)}")


def _nearest(path: str, folders: tuple[Path, ...]) -> str:
    names = sorted(file.name for folder in folders for file in folder.glob("*.json"))
    near = difflib.get_close_matches(f"{path.removesuffix('.json')}.json", names, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{hint} In configs/ there are: {', '.join(names)}." if names else ""


def key_value_heads(heads: int, shared: int) -> int:
    """Return a draft's key/value heads: the original's share of its `heads`, and two where it has two.

    With fewer tensor parallelism could not be tried.
    """
    return min(shared, max(2, HEADS * shared // heads))


def with_dimensions(recipe: Recipe) -> Recipe:
    """Return the recipe with the dimensions of the model that it will train: its draft's, its folder's or its page's.

    Raises:
        UserError: the model's folder holds a config.json that is none.
    """
    local = Path(recipe.model.path, "config.json")
    config = dict(recipe.model.config)
    if recipe.draft.enabled:
        heads, shared = config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1)
        sizes = {"num_attention_heads": HEADS, "num_key_value_heads": key_value_heads(heads, shared)}
        sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
        sizes["num_hidden_layers"] = recipe.draft.layers
        config |= {name: size for name, size in sizes.items() if name in config}
    elif local.exists():
        config = read_json(local)
    return replace(recipe, model=replace(recipe.model, config=config))


def check_data(recipe: Recipe) -> None:
    """Read every local text file once and refuse what training could not use; of streamed ones only the start.

    Parquet, Arrow, folders and the Hub are checked by the same rules when the ranks read them.

    Raises:
        UserError: options that contradict each other; a file that is missing, empty, not UTF-8 or not JSON at a line,
            or a row that lacks what the method needs.
    """
    _check_options(recipe)
    for path in (recipe.data.path, recipe.data.validation):
        for name in names(path):
            if Path(name).is_dir() and not any(file.suffix in files.SUFFIXES for file in Path(name).rglob("*")):
                raise UserError(f"{name}: no data file in it, in any folder below ({', '.join(files.SUFFIXES)}).")
            if Path(name).is_file() and Path(name).suffix not in files.COLUMNAR:
                most = STREAMED if recipe.data.streaming and path == recipe.data.path else None
                check_file(Path(name), recipe.method, recipe.data.form, most)


def _check_options(recipe: Recipe) -> None:
    data = recipe.data
    files.weights(data)
    if not data.validation_share < 1:
        raise UserError(f"data.validation_share={data.validation_share}: must be below 1; 0.05 holds out a twentieth.")
    if not data.streaming:
        return
    if recipe.method == "dpo":
        raise UserError("data.streaming=true: the method dpo reads its pairs before training; leave it out.")
    if recipe.max_steps is None:
        raise UserError("data.streaming=true: a stream has no length, so say when to stop: add max_steps=1000.")
    if data.validation_share and not data.validation:
        raise UserError(
            f"data.validation_share={data.validation_share}: a stream cannot be split; name a file in data.validation."
        )


def check_file(path: Path, method: str, form: str = "auto", most: int | None = None) -> int:
    """Check a text file's first `most` examples (None: all) for a method and return how many they are.

    Raises:
        UserError: names the file, the line, the field and the fix.
    """
    count = sum(1 for _ in islice(rows.converted(files.read(path), method, form), most))
    if not count:
        raise UserError(f"{path}: empty; one JSON object per line is expected.")
    return count


def check_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse to write `needed` bytes where there is no room for them.

    Raises:
        UserError: names the folder, what is free and what is needed.
    """
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{folder}: {what} needs about {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB is free.\n"
            "Free some room, choose another --output-dir, or write less often (save_steps=0: only the export)."
        )


def gathered_bytes(total: int, trainable: int, bytes_per_weight: int, stage: int) -> int:
    """Return what rank 0 gathers in host memory to write one checkpoint, in bytes: under ZeRO-3 the trained weights."""
    return bytes_per_weight * (trainable if trainable < total else total) if stage == 3 else 0


def free_memory() -> int:
    """Return the bytes of host memory that can be had without swapping: the machine's, or this container's."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no cgroup of version 2, or one without a limit ("max")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached["inactive_file"]))
    return free


def check_memory(needed: int, what: str) -> None:
    """Refuse to gather `needed` bytes in host memory that has no room for them.

    Raises:
        UserError: names what is free and what is needed.
    """
    free = free_memory() if needed else 0
    if free < needed:
        raise UserError(
            f"{what} gathers {needed / GIB:.2f} GiB in host memory, and {free / GIB:.2f} GiB is free.\nFree some, or "
            "write the weights only in DeepSpeed's own form: stage3_gather_16bit_weights_on_model_save=false."
        )
