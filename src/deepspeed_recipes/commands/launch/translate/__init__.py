"""`ds-recipes launch --from FILE`: what a training file of another tool becomes here, and what it does not."""

import json
import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....recipe import deepspeed_file, files, limits, overrides, pages
from ....recipe.errors import UserError, first_line, of_system, redact
from ....recipe.files import Json, JsonView
from ....recipe.project import CONFIGS, command
from ....recipe.recipe import Recipe
from . import axolotl, llama_factory, trl
from .translation import Translation

VARIANTS = {
    ("sft", ""): "full",
    ("sft", "lora"): "lora",
    ("sft", "qlora"): "qlora",
    ("sft", "dora"): "dora",
    ("dpo", ""): "dpo_full",
    **{(method, "lora"): f"{method}_lora" for method in ("dpo", "kto", "orpo", "simpo")},
    **{(method, adapter): method for method in ("pretrain", "reward", "grpo") for adapter in ("", "lora")},
}
"""The variant of a method and of its adapters. 4-bit weights and DoRA of the other methods are keys added to `lora`."""
TYPICAL = "llama3-8b"
"""A recipe whose checks hold for models without a page, except for the keys that only some models have."""
OF_SOME_MODELS = ("model.", "data.max_pixels=", "layout.expert=", "router_aux_loss_coef=")
OF_LLAMA_FACTORY = {"stage", "finetuning_type", "template", "dataset_dir"}
OF_TRAINING_ARGUMENTS = {"model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "output_dir"}
"""Keys of which a file has at least one; LLaMA-Factory's have `model_name_or_path` as well."""
SWIFT = {"train_type", "tuner_type", "rlhf_type", "freeze_vit", "freeze_aligner", "split_dataset_ratio", "use_hf"}
"""Keys that only ms-swift's files have."""
SWITCHES = {"true": True, "false": False}
SUFFIXES = (".yaml", ".yml", ".json")
WIDTH = 116


def main(file: Path, gpus: int | None, nodes: int | None, changes: list[str], page: Path | None = None) -> int:
    """Print the command for another tool's YAML or JSON file; return 1 if the run would train differently.

    `gpus` per machine and `nodes` are 1 unless the user gave them. `changes`, the user's overrides, win. With `page`,
    the translation is kept in a new page.
    """
    if words := [change for change in changes if "=" not in change]:
        raise UserError(f"--from {file}: {words[0]}: the file names model and method; only key=value can be added.")
    found = translate(file, (gpus or 1) * (nodes or 1))
    keys = overrides.override_keys()
    for key in overrides.keys_of(changes):
        if key not in keys:
            raise UserError(overrides.unknown(key, list(keys)))
    found.give(dict(change.partition("=")[::2] for change in changes))
    for option, given in (("--gpus", gpus), ("--nodes", nodes)):
        found.options += [option, str(given)] if given else []
    try:
        shown = report(found, file)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    print("\n".join(shown))
    if page:
        write(found, file, page)
        print(f"\nwritten: {page}; to run it: {_launch(page, found)}")
    return 1 if found.missing else 0


def translate(file: Path, gpus: int) -> Translation:
    """Return the translation of a training file."""
    values = read(file)
    if "train_dataset" in values:
        raise UserError(f"{file}: a file of LLaMA-Factory's v1 (train_dataset); only its files with `stage` are read.")
    for key in ("deepspeed", "fsdp_config"):
        if isinstance(given := values.get(key), str) and not Path(given).is_file():  # of the tool's checkout
            places = (folder / given for folder in (file.parent, *file.parent.parents))
            values[key] = str(next(filter(Path.is_file, places), given))
    of_factory = "model_name_or_path" in values and bool(OF_LLAMA_FACTORY & values.keys())
    of_trainer = bool(OF_TRAINING_ARGUMENTS & values.keys()) and not (SWIFT | {"model"}) & values.keys()
    try:
        if not (of_factory or of_trainer or "base_model" in values):
            raise UserError(_unknown(values))
        for key, value in values.items():
            if hole := re.search(r"\$\{[^}]*\}|\{\{.*?\}\}", str(_without_templates({key: value}))):
                raise UserError(f"{key}: {hole[0]} is filled in by another program; write the value, and try again.")
        if of_factory:
            for name, value in values.items():
                if isinstance(value, str) and value.lower() in SWITCHES:
                    raise UserError(f'{name}: "{value}" is text, which is true there; write it without the quotes.')
            found = llama_factory.translate(values, gpus, file.parent)
        elif "base_model" in values:
            found = axolotl.translate(_unquoted(values), gpus)
        else:
            found = trl.translate(_unquoted(values), gpus)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    found.gpus = gpus
    return found


def _unquoted(value: Any) -> Any:
    """Return a value with `"true"` and `"false"` in quotes as what they say, as Axolotl and TRL read them."""
    if isinstance(value, dict):
        return {name: _unquoted(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_unquoted(inside) for inside in value]
    return SWITCHES.get(value.lower(), value) if isinstance(value, str) else value


def _without_templates(value: Any) -> Any:
    """Return a value without chat templates, whose braces no other program fills in."""
    if isinstance(value, dict):
        return {name: _without_templates(inside) for name, inside in value.items() if "chat_template" not in name}
    return [_without_templates(inside) for inside in value] if isinstance(value, list) else value


def read(file: Path) -> Json:
    """Return the settings in a YAML or JSON file: a mapping without double keys."""
    import yaml  # not in the standard library, and only this command needs it

    class Loader(yaml.SafeLoader):
        """Refuses a repeated key, of which YAML takes the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            names = [
                self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"
            ]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{file}:{node.start_mark.line + 1}: the key {twice} is there twice.")
            return super().construct_mapping(node, deep)

    files.check_ends(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(of_system(error, file)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read: {first_line(error)}.") from None
    if file.suffix in (".sh", ".bash") or text.startswith("#!"):
        raise UserError(
            f"{file}: a script of commands; give the options in it to ds-recipes launch, which reads most of them: "
            "ds-recipes launch RECIPE VARIANT --lora_rank 8 ..."
        )
    what = "JSON" if file.suffix == ".json" else "YAML"
    try:
        values = json.loads(text, object_pairs_hook=files.unique) if file.suffix == ".json" else yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{file}:{line}: not valid {what}: {error.problem or first_line(error)}.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not valid {what}: {error.msg}.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{file}: not valid {what}: {first_line(error)}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{file}: not a training file: its top level must be settings, `key: value`.")
    return values


def _unknown(values: JsonView) -> str:
    if SWIFT & values.keys():
        return "a file of ms-swift, which is not translated; key=value reads most of its keys (scripts/README.md)."
    if any(key.startswith("zero_") for key in values):
        return "a configuration of DeepSpeed, which trains nothing by itself; give it to a recipe as deepspeed=FILE."
    if "distributed_type" in values:
        return "a configuration of accelerate, which starts ranks and trains nothing; give the training file."
    if any(isinstance(value, dict) and "_component_" in value for value in values.values()):
        return "a file of torchtune, which is not translated; key=value reads most of its keys (scripts/README.md)."
    if "recipes" in values or "policy" in values or "trainer" in values:
        return "a configuration in sections, of a tool that is not known here; LLaMA-Factory's and Axolotl's are read."
    if "model" in values and OF_TRAINING_ARGUMENTS & values.keys():
        return (
            "model: a key of another tool, such as ms-swift; LLaMA-Factory's and TRL's files have model_name_or_path, "
            "and Axolotl's base_model."
        )
    return "not a training file of LLaMA-Factory, Axolotl or TRL (none of base_model, model_name_or_path, output_dir)."


def variant(found: Translation) -> str:
    """Return the variant of a translation; without one that fits, the nearest, and the difference is recorded."""
    if found.method != "sft" and found.adapter in ("qlora", "dora"):
        if found.adapter == "dora":
            found.overrides["lora.dora"] = "true"
        _plain_lora(found)
    if (named := VARIANTS.get((found.method, found.adapter))) is None:
        found.missing["method"] = f"{found.method} with all weights: only adapters are trained"
        return f"{found.method}_lora"
    return named


def _plain_lora(found: Translation) -> None:
    """Take the variant of plain adapters, also in what the file's keys have become."""
    found.translated |= {name: "lora" for name, ours in found.translated.items() if ours == found.adapter}
    found.adapter = "lora"


def recipe_of(model: str) -> str | None:
    """Return `FAMILY-SIZE` of the page with a model, or None: then `auto MODEL` borrows one."""
    sizes = ((family, size, one) for family in pages.families() for size, one in pages.page(family).SIZES.items())
    return next((f"{family}-{size}" for family, size, one in sizes if one.path == model), None)


def command_of(found: Translation) -> list[str]:
    """Return the words of the command, without the settings that the recipe has already."""
    name, chosen = recipe_of(found.model), variant(found)
    changes = [f"{key}={value}" for key, value in found.overrides.items()]
    keys = overrides.override_keys()
    for key, value in found.overrides.items():
        overrides.parse(key, value, keys[key])
    if name is None:
        general = [change for change in changes if not change.startswith(OF_SOME_MODELS)]
        _refused(found, pages.find(TYPICAL, chosen), general)
        return ["auto", found.model, chosen, *changes, *found.options]
    if chosen in ("qlora", "dora") and (why := pages.without(pages.page(pages.split(name)[0])).get(chosen)):
        found.missing[chosen] = " ".join(why.split())
        found.overrides.pop("model.quantization", None)
        found.overrides.pop("lora.dora", None)
        _plain_lora(found)
        return command_of(found)
    start = pages.find(name, chosen)
    if start.model.vision and found.overrides.get("truncate") == "true":
        found.overrides["truncate"] = "false"
        found.missing["truncate"] = "examples with images that are too long are left out, not cut"
        return command_of(found)
    made = _refused(found, start, changes)
    words = overrides.differences(start, made) if made else changes
    return [name, chosen, *(word for word in words if word not in _data(found)), *found.options]


def _data(found: Translation) -> list[str]:
    """Return the word that stands for the user's data if the file names none."""
    return [] if "data.path" in found.overrides else ["data.path=FILE"]


def _refused(found: Translation, start: Recipe, changes: list[str]) -> Recipe | None:
    """Return the changed recipe, or record settings that exclude each other here, and return None."""
    try:
        made = overrides.apply(start, [*changes, *_data(found)])
        limits.check_micro_batch(made)
        place = next(filter(Path.is_file, (Path(made.deepspeed), CONFIGS / made.deepspeed)), None)
        # The dimensions of a model other than that of the page `start` are not known here.
        known = made if recipe_of(found.model) else replace(made, model=replace(made.model, config={}))
        if place:
            limits.check(known, found.gpus, deepspeed_file.read(place))
        return made
    except UserError as error:
        found.missing["the command"] = f"the launcher refuses it: {error}"
        return None


def report(found: Translation, file: Path) -> list[str]:
    """Return the lines that show a translation: the command, then what has become of every key."""
    words = command_of(found)
    typed = [""]  # the command over several lines, each ended by a backslash except the last
    for word in map(shlex.quote, [*command("launch").split(), *words, *_data(found)]):
        if len(typed[-1]) + len(word) > WIDTH:
            typed[-1] += " \\"
            typed.append("   ")
        typed[-1] += f" {word}"
    lines = [f"{found.tool}: {file}", "", typed[0].lstrip(), *typed[1:]]
    usual = [f"{key}={found.overrides[key]}" for key in sorted(found.by_default) if key in found.overrides]
    same = [name for name, ours in found.translated.items() if ours == f"{name}={_short(found.values.get(name))}"]
    changed = {name: ours for name, ours in found.translated.items() if name not in same}
    needed = {name: why for name, why in found.missing.items() if name in ("model", "dataset")}
    lost = {name: why for name, why in found.missing.items() if name not in needed}
    sections = {
        "translated": _each(found, changed, " -> ")
        + _filled("the same here:", same)
        + _filled("off, as here:", found.off),
        f"{found.tool}'s defaults{'' if found.complete else ' for what the file does not set'}": _filled("", usual),
        "to know": list(dict.fromkeys(found.remarks)),
        "not needed": [f"{name}: {why}" for name, why in found.unneeded.items()],
        "for you to set, if you want it": _each(found, found.yours, ": "),
        "STILL NEEDED": _each(found, needed, ": "),
        "NO EQUIVALENT, so the run trains differently": _each(found, lost, ": "),
    }
    for title, entries in sections.items():
        if entries:
            lines += ["", f"{title}:", *(f"  {entry}" for entry in entries)]
    return lines


def _each(found: Translation, entries: Mapping[str, str], between: str) -> list[str]:
    """Return a line for each key: its value in the file, and the remark on it."""
    given = {name: f": {_short(found.values[name])}" if name in found.values else "" for name in entries}
    return [f"{name}{given[name]}{between}{said}" for name, said in entries.items()]


def _filled(first: str, words: list[str]) -> list[str]:
    return textwrap.wrap(" ".join([first, *words]).strip(), WIDTH) if words else []


PAGE = '''"""{family}: {model}, as {source} ({tool}) trained it.

    {launch}
"""

from deepspeed_recipes import launch
from deepspeed_recipes.recipe import Recipe, overrides, pages

SETTINGS = [
{settings}
]
"""The file's settings that differ from {start} {variant}."""
SIZES = {{"{size}": pages.find("{start}", "{variant}").model}}


def {variant}(size: str) -> Recipe:
    """As {source} trained it."""
    return overrides.apply(pages.find("{start}", "{variant}"), SETTINGS)


if __name__ == "__main__":
    launch(__file__)
'''


def write(found: Translation, file: Path, page: Path) -> None:
    """Write a page with the translation as its only variant."""
    start, *rest = command_of(found)
    if why := found.missing.get("the command"):
        raise UserError(f"--write {page}: {why}")
    if start == "auto":
        raise UserError(
            f"--write {page}: {found.model} has no page to start from; use the command, or give "
            f"model.path={found.model} to a recipe of its architecture (ds-recipes launch --list)."
        )
    if page.suffix != ".py" or not page.stem.isidentifier():
        raise UserError(f"--write {page}: name a Python file whose name is one word, such as ours.py.")
    if page.exists():
        raise UserError(f"--write {page}: exists; choose a new name.")
    settings = [word for word in rest[1:] if "=" in word and not word.startswith("-")]
    text = PAGE.format(
        family=page.stem,
        model=found.model,
        source=file.name,
        tool=found.tool,
        launch=_launch(page, found),
        variant=rest[0],
        start=start,
        size=pages.split(start)[1],
        settings="\n".join(f"    {json.dumps(word, ensure_ascii=False)}," for word in settings),
    )
    files.check_writable("--write", page)
    files.write_text(page, text)


def _launch(page: Path, found: Translation) -> str:
    """Return the command for a page, with the options that no page holds."""
    typed = str(page) if page.is_absolute() else f"./{page}"
    return f"{command('launch')} {shlex.join([typed, variant(found), *found.options])}"


def _short(value: object) -> str:
    text = redact(str(value if not isinstance(value, bool) else str(value).lower()))
    return text if len(text) <= 60 else f"{text[:57]}..."
