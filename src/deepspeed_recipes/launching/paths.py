"""Makes a recipe's paths absolute: the model, the data and the DeepSpeed file, as the ranks will open them."""

import difflib
import glob
import re
from dataclasses import replace
from pathlib import Path

from ..recipe import new_tokens, own_code
from ..recipe.errors import UserError
from ..recipe.methods import Distill
from ..recipe.project import CONFIGS
from ..recipe.recipe import Recipe, names
from ..recipe.run_folder import RunFolder
from ..training.data import text_files
from ..training.model_folder.record import own_path


def locate(recipe: Recipe, mount: str | None = None) -> Recipe:
    """Return the recipe with its local paths made absolute, so that every rank and a later resume find the files.

    A path is relative to the current folder; a DeepSpeed file may also be the name of a file in `configs/`. A path that
    does not exist and looks like a Hub id stays unchanged, and so does every path below `mount`, a folder that only
    other machines have. Other missing files, and folders without a model, are refused.
    """
    data = replace(
        recipe.data,
        path=_each_absolute("data.path", recipe.data.path, mount),
        validation=recipe.data.validation and _each_absolute("data.validation", recipe.data.validation, mount),
        metric=",".join(_code("data.metric", name, mount) for name in names(recipe.data.metric)),
        transform=recipe.data.transform and _code("data.transform", recipe.data.transform, mount),
    )
    model = replace(recipe.model, path=_absolute("model.path", recipe.model.path, mount))
    if Path(model.path).exists() and not Path(model.path, "config.json").is_file():
        what = "this folder has no config.json. Give a Hugging Face model folder, for instance a run's export/."
        if Path(model.path, "adapter_config.json").is_file():
            merged = f"ds-recipes export {recipe.model.path} --merge --output DIR"
            what = f"an adapter, which has to be merged first: {merged}; then give model.path=DIR."
        raise UserError(f"model.path={recipe.model.path}: {what}")
    if model.new_tokens is not None:  # the ranks and a later resume need no file
        model = replace(model, new_tokens=new_tokens.as_text(new_tokens.read(model.new_tokens)))
    if model.chat_template == "none":
        raise UserError(
            "model.chat_template=none: prompts and answers need a template. For raw completions name a file of this:\n"
            "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'assistant' %}{% generation %}"
            "{{ turn.content + eos_token }}{% endgeneration %}{% else %}{{ turn.content }}{% endif %}{% endfor %}\n"
            "For whole documents take the variant pretrain, whose examples are a 'text' each."
        )
    if model.chat_template not in ("auto", "chatml"):
        model = replace(model, chat_template=_absolute("model.chat_template", model.chat_template, mount))
    deepspeed = _absolute("deepspeed", recipe.deepspeed, None, CONFIGS)
    method = recipe.method
    if isinstance(method, Distill):
        if method.teacher and not method.served:
            teacher = _absolute("distill.teacher", method.teacher, mount)
            if Path(teacher).exists() and not _holds_model(Path(teacher)):
                trained = _holds_model(RunFolder(Path(teacher)).export)
                what = f"its model is in {method.teacher}/export" if trained else "give a Hugging Face model folder"
                raise UserError(f"distill.teacher={method.teacher}: this folder has no config.json; {what}.")
            method = replace(method, teacher=teacher)
        if method.cache:  # which may not exist yet
            method = replace(method, cache=str(Path(method.cache).absolute()))
    located = replace(
        recipe,
        data=data,
        model=model,
        deepspeed=deepspeed,
        method=method,
        reward=recipe.reward and _code("reward", recipe.reward, mount),
        callbacks=recipe.callbacks and _code("callbacks", recipe.callbacks, mount),
        loss=recipe.loss and _code("loss", recipe.loss, mount),
    )
    return replace(located, code=own_code.digests(located))


def _holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model, or an adapter, which `weights.check` refuses with the command to merge."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _code(key: str, text: str, mount: str | None) -> str:
    """Return the user's own code with its files' absolute paths; a built-in metric is unchanged."""
    found = own_code.functions(key, text)
    return ",".join(f"{_absolute(key, one.path, mount)}:{one.name}" for one in found) or text


def _each_absolute(key: str, paths: str, mount: str | None) -> str:
    return ",".join(_absolute(key, path, mount) for path in names(paths))


def _absolute(key: str, path: str, mount: str | None, *folders: Path) -> str:
    if mount and Path(path).is_relative_to(mount):
        return path
    for folder in (Path(), *folders):
        place = folder / path
        if key == "deepspeed" and place.suffix in (".yaml", ".yml") and place.is_file():
            stage = re.search(r"^\s*zero_stage:\s*([0-3])\b", place.read_text(errors="replace"), re.MULTILINE)
            ours = f"deepspeed=zero{stage[1]}.json" if stage else "deepspeed=FILE.json"
            raise UserError(f"{key}={path}: a configuration of accelerate, and a run takes DeepSpeed's JSON: {ours}.")
        if key.startswith("data.") and place.name == "dataset_info.json" and place.is_file():
            raise UserError(
                f"{key}={path}: a list of LLaMA-Factory's data sets; name their files, or give --from FILE.yaml."
            )
        if place.is_file() or place.is_dir():
            return str(place.resolve())
        if place.exists():
            raise UserError(f"{key}={path}: a pipe or a device, which ranks cannot read again; save it as a file.")
        for inside in (place.parent, place.parent / "data") if key == "data.validation" else ():
            of_split = sorted(inside.glob(f"{glob.escape(place.name)}[.-]*"))
            if found := [str(file.resolve()) for file in of_split if text_files.suffix(file) in text_files.SUFFIXES]:
                return ",".join(found)  # FOLDER/test of a folder with files that are named for splits
        if place.is_symlink():
            raise UserError(f"{key}={path}: a link to {place.readlink()}, which does not exist.")
    if own := own_path(path):  # an export's name for a sample
        return str(own)
    start, mark, number = path.rpartition("#")
    if mark and number.isdigit() and Path(start).exists():
        raise UserError(f"{key}={path}: write {key}={start} data.max_examples={number}, which draws as many from all.")
    looks_like_hub_id = (
        path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).suffix[1:].isalpha()
    )
    if key in ("model.path", "data.path", "distill.teacher") and looks_like_hub_id:
        return path
    if key == "data.validation" and re.fullmatch(r"([\w-][\w.-]*/){2}\w+", path) and not Path(path).parents[1].exists():
        return path  # OWNER/NAME/SPLIT on the Hub
    if key == "model.chat_template":  # the names of LLaMA-Factory and ms-swift: llama3, qwen
        raise UserError(f"{key}={path}: no such file; without this setting the tokenizer's own template is used.")
    known = sorted(file.name for folder in folders for file in folder.glob("*.json"))
    near = difflib.get_close_matches(f"{path.removesuffix('.json')}.json", known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    hint += f" configs/ has: {', '.join(known)}." if known else ""
    raise UserError(f"{key}={path}: no such file or folder.{hint}")
