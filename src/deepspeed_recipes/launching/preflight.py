"""The launcher's checks before it starts anything: the DeepSpeed file, the layout and the data.

Apart from the linter this needs only the standard library, and takes milliseconds.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from ..config import lint
from ..recipe import compatibility, deepspeed_file, limits, new_tokens, overrides, own_code
from ..recipe.conversions import from_dict, to_dict
from ..recipe.deepspeed_file import DeepSpeedFile
from ..recipe.errors import UserError
from ..recipe.layout import DRAFT_EXPERTS, DRAFT_HEADS, bubble, draft_key_value_heads, gradient_accumulation_steps
from ..recipe.methods import Distill
from ..recipe.project import SAMPLES, python_path
from ..recipe.recipe import Data, Recipe, names
from ..training.data import classes, images, text_files
from ..training.data.forms import formats
from ..training.methods.distillation import vocabulary
from ..training.model_folder import weights
from ..training.model_folder.base_model import config_of
from . import chat_template

UNKNOWN = "only the ranks will know"
"""Key for the number of sources that only the ranks read."""
UNNAMED = Data(path="")
"""Data whose examples are read as they are."""
STREAMED = 1000
"""Number of examples of a streamed file that are checked."""
REWARDS = SAMPLES / "rewards.py"
COMPARES = ("exact_match", "same_facts", "number_and_unit")
"""Its functions that compare with an expected answer."""
REFERENCES = 4
"""Number of references on which the user's own metrics are tried."""

ADAM_BETA1 = 0.9
"""The Trainer's default, which no key of a recipe changes."""


def check_config(recipe: Recipe, ranks: int, ranks_each: int) -> None:
    """Lint the DeepSpeed configuration for this run: print warnings, and stop at errors."""
    compared = {"per_device_train_batch_size": recipe.micro_batch_size}
    with contextlib.suppress(UserError, ZeroDivisionError):  # `check_layout` refuses the layout or the batch
        compared["gradient_accumulation_steps"] = gradient_accumulation_steps(recipe, ranks)
    findings = findings_of(recipe, ranks, ranks_each, compared)
    if error := lint.first_error(findings, recipe.deepspeed, f"{recipe.deepspeed} --world-size {ranks}"):
        # The linter reads only the file, and would suggest another file if a key of the recipe is the mistake.
        check_layout(recipe, deepspeed_file.read(recipe.deepspeed), ranks, ranks_each)
        raise UserError(error)
    for finding in findings:
        # None of these applies to a run: `upstream` leaves out the step of zeros and finds fp32 copies in their order,
        # and the run's Trainer accumulates and finds the hidden size, which a bare Accelerator does not.
        harmless = ("step-of-zeros", "round-robin-order", "no-hidden-size", "accumulation-missing")
        if finding.rule not in harmless:
            print(lint.describe(finding, recipe.deepspeed), flush=True)


def findings_of(
    recipe: Recipe, ranks: int | None, ranks_each: int, batch: Mapping[str, object] = MappingProxyType({})
) -> list[lint.Finding]:
    """Return the linter's findings for a recipe's DeepSpeed file, in the recipe's keys; the ranks may be unknown.

    The Trainer compares the file's values with the recipe's, and its batch sizes with the known ones in `batch`.
    """
    local = Path(recipe.model.path, "config.json")
    compared = {
        "max_grad_norm": recipe.max_grad_norm,
        "fp16": recipe.precision == "fp16",
        "bf16": recipe.precision == "bf16",
        "fp16_full_eval": False,
        "bf16_full_eval": False,
        "learning_rate": recipe.learning_rate,
        "adam_beta1": ADAM_BETA1,
        "adam_beta2": recipe.adam_beta2,
        "adam_epsilon": recipe.adam_epsilon,
        "weight_decay": recipe.weight_decay,
        "warmup_steps": recipe.schedule.warmup,
        "max_steps": recipe.max_steps or -1,
    }
    findings = lint.lint(
        recipe.deepspeed,
        world_size=ranks,
        gpus_per_node=ranks_each,
        model=local if local.exists() else dict(recipe.model.config) or None,
        lora=recipe.lora is not None and recipe.layout.tensor == 1,  # `layout.tensor` also splits adapters
        arguments={**compared, **batch},
    )
    # `arguments.deepspeed_config` removes these keys of the file for the layout.
    removed = {"train_batch_size"} if recipe.layout.tensor > 1 or recipe.layout.pipeline > 1 else set()
    # `arguments` sets it where the file leaves it out.
    removed |= {one.key for one in findings if one.rule == "swap-buffer-too-small" and one.value is None}
    if recipe.layout.expert > 1:
        removed |= {one.key for one in findings if one.key.startswith("optimizer.")}
    return _in_keys([one for one in findings if one.key not in removed], recipe, ranks or 1)


def _in_keys(findings: Sequence[lint.Finding], recipe: Recipe, ranks: int) -> list[lint.Finding]:
    """Return the findings, with all values that contradict the recipe as the first one, in the recipe's keys."""
    differing = [one for one in findings if one.rule == "fixed-for-trainer" and one.severity == "error"]
    if not differing:
        return list(findings)
    changes: dict[str, object] = {}
    for finding in sorted(differing, key=lambda one: one.value is not True):  # fp16=true, not bf16=false
        first, _, last = finding.key.rpartition(".")
        value: Any = finding.value
        if last == "gradient_accumulation_steps":  # known, or it would be no error
            value *= recipe.global_batch_size // gradient_accumulation_steps(recipe, ranks)
        elif last == "betas":
            value = value[1] if isinstance(value, list) and len(value) == 2 and value[0] == ADAM_BETA1 else None
        elif last == "enabled":
            value = first if value else "fp32"
        settable = value is not None and not (last == "train_batch_size" and recipe.layout.sequence > 1)
        named = first if last == "enabled" else last
        changes.setdefault(overrides.FOREIGN_NAMES.get(named, named), value if settable else None)
    typed = [f"{key}={value}" for key, value in changes.items() if value is not None]
    all_of_them = "" if len(differing) == 1 else " for each"
    fix = f'write "auto" in the file{all_of_them}' + (f", or add {' '.join(typed)}" if typed else "")
    if unset := [key for key, value in changes.items() if value is None] if typed else []:
        fix += f', with "auto" for {" and ".join(unset)}'
    what = f"the recipe has {' '.join(overrides.as_typed(recipe, changes))}; DeepSpeed and the Trainer need one value"
    key = ", ".join(f"{one.key} = {json.dumps(one.value)}" for one in differing)
    one = replace(differing[0], key=key, value=None, what=what, fix=fix)
    return [one, *(other for other in findings if other not in differing)]


def check_model(recipe: Recipe) -> None:
    """Refuse folders from which training cannot start: the model's, unless the run is a draft, and the teacher's."""
    if not recipe.draft.enabled:
        weights.check_intact(Path(recipe.model.path))
        weights.check(Path(recipe.model.path))
        new_tokens.check(
            new_tokens.read(recipe.model.new_tokens), vocabulary.tokens(Path(recipe.model.path)), recipe.model.path
        )
        # The ranks also check special tokens and the data.
        if known := vocabulary.tokens(Path(recipe.model.path), special=False):
            weights.check_tokens(Path(recipe.model.path), known, (), f"model.path={recipe.model.path}")
    if isinstance(recipe.method, Distill) and not recipe.method.served:
        weights.check(Path(str(recipe.method.teacher)), "distill.teacher")


def check_layout(recipe: Recipe, file: DeepSpeedFile, ranks: int, ranks_each: int) -> None:
    """Refuse a layout that cannot run; report tensor parallelism across nodes, and stages that idle unnecessarily."""
    known = with_dimensions(recipe)
    limits.check(known, ranks, file)
    limits.check_micro_batch(recipe)
    for line in limits.check_blocks(known, file):
        print(line, flush=True)
    if isinstance(recipe.method, Distill):
        teacher = str(recipe.method.teacher)
        ours, theirs = (vocabulary.tokens(Path(path)) for path in (recipe.model.path, teacher))
        if ours and theirs:  # both are local folders; the ranks check the other cases
            vocabulary.check(teacher, ours, theirs)
        if config := config_of(Path(teacher)):
            vocabulary.check_positions(teacher, config, recipe)
    if ranks > ranks_each and ranks_each % recipe.layout.tensor:
        print(
            f"layout.tensor={recipe.layout.tensor}: groups span nodes of {ranks_each} ranks, so several all-reduces "
            "per layer cross the network. A divisor of the ranks per node avoids this; ZeRO or pipeline stages go "
            "across nodes.",
            flush=True,
        )
    stages, micro_batches = recipe.layout.pipeline, gradient_accumulation_steps(recipe, ranks)
    if stages > 1 and micro_batches < 4 * stages:
        print(
            f"layout.pipeline={stages}: with {micro_batches} micro-batches per step the stages idle "
            f"{bubble(stages, micro_batches):.0%} of the time; with {4 * stages}, from a larger global_batch_size or a "
            f"smaller micro_batch_size, {bubble(stages, 4 * stages):.0%}.",
            flush=True,
        )


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers that are not installed.

    W&B is part of the training stack; if the stack is missing, the command reports that before it starts anything.
    """
    stack = importlib.util.find_spec("deepspeed") is not None
    for name in recipe.trackers:
        if (stack or name != "wandb") and importlib.util.find_spec(name) is None:
            raise UserError(f"tracking={name}: {name} is not installed; pip install {name}, or leave it out.")


def with_dimensions(recipe: Recipe) -> Recipe:
    """Return the recipe with the dimensions of the trained model: the draft's, the folder's or the page's."""
    config = dict(recipe.model.config)
    if recipe.draft.enabled:
        heads, shared = config.get("num_attention_heads", 1), config.get("num_key_value_heads", 1)
        sizes = {"num_attention_heads": DRAFT_HEADS, "num_key_value_heads": draft_key_value_heads(heads, shared)}
        sizes |= dict.fromkeys(compatibility.EXPERT_COUNTS, DRAFT_EXPERTS)
        sizes["num_hidden_layers"] = recipe.draft.layers
        config |= {name: size for name, size in sizes.items() if name in config}
    else:
        config = config_of(Path(recipe.model.path)) or config
    return replace(recipe, model=replace(recipe.model, config=config))


def check_data(recipe: Recipe, listed: bool = False) -> int | None:
    """Read every local text file once, refuse unusable data, and return the number of training examples.

    Of streamed, Parquet and Arrow files only the beginning is read. The ranks check all examples by the same rules,
    also those of folders with splits and of Hub datasets; if only they can count them, the result is None. `listed`
    prints the keys of examples that nothing reads, as the ranks do.
    """
    own = own_code.of_recipe(recipe)
    for key, functions in own.items():
        own_code.check_files(key, [one for one in functions if _is_here(one)])
    text_files.weights(recipe.data)  # this and the next line refuse what they cannot read
    formats.reading_of(recipe.data)
    code = [one for key, functions in own.items() if key != "reward" for one in functions]
    if not code:
        return _checked_data(recipe, listed)
    if importlib.util.find_spec("torch") is None or not all(map(_is_here, code)):  # only the cluster has them
        return None if recipe.data.transform else _checked_data(recipe, listed)
    # In another process: the code may import torch, which would keep hundreds of MB in the launcher until the run ends.
    done = subprocess.run(
        [sys.executable, "-m", __name__, *["listed"] * listed],
        input=json.dumps(to_dict(recipe)),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | python_path(os.environ) | {"CUDA_VISIBLE_DEVICES": ""},  # the GPU's memory is for the ranks
    )
    try:
        found: int | str | None = json.loads(done.stdout)
    except ValueError:
        shown = ", ".join(f"{key}={one}" for key, functions in own.items() for one in functions)
        raise UserError(f"{shown}: the process that tried this code ended with status {done.returncode}.") from None
    if isinstance(found, str):
        raise UserError(found)
    return found


def _is_here(function: own_code.Function) -> bool:
    """Return True unless only other machines have the file; `paths.locate` refuses files that are nowhere."""
    return Path(function.path).is_file()


def _answer() -> None:
    """Try the code of the recipe on standard input and check its data, in a process that `check_data` has started.

    Writes the number of examples, or an error message, to standard output.
    """
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # stdout is for the reply, and the code may print, and so may what is imported
    from ..training import own_code as rank_code  # not at the top: imports torch

    recipe = from_dict(json.load(sys.stdin))
    data = recipe.data
    try:
        # The references for metrics: the last answers of the first examples here, held-out ones if there are any.
        answers: list[str] = []
        file = next(filter(Path.is_file, map(Path, names(data.validation) + names(data.path))), None)
        if file and own_code.functions("data.metric", data.metric) and not recipe.model.vision:
            located = formats.prepared(text_files.read(file), formats.reading_of(data))
            found = islice(formats.converted(located, recipe.method.name, data.form), REFERENCES)
            turns = (example["messages"][-1] for example in found)
            answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        rank_code.try_all(with_dimensions(recipe), answers)
        json.dump(_checked_data(recipe, "listed" in sys.argv), reply)
    except UserError as error:
        json.dump(str(error), reply)
    reply.close()


def _checked_data(recipe: Recipe, listed: bool = False) -> int | None:
    """Return the number of training examples of local text files, or None if only the ranks can count them.

    If `listed`, print the keys of examples that nothing reads.
    """
    counts: list[int | None] = []
    bad = text_files.BadExamples(formats.column_fields(recipe.data.columns))
    method = (recipe.method.name, recipe.data, recipe.model.vision)
    rendering = chat_template.Rendering(recipe)
    reads_columns = importlib.util.find_spec("pyarrow") is not None
    kinds_of: dict[str, Counter[object]] = {}
    every = names(recipe.data.path) + names(recipe.data.validation)
    files_of = {name: text_files.files_of(Path(name), recipe.data.split) for name in every}
    known_files = [files for files, _ in files_of.values()]
    if all(known_files) and (reads_columns or not any(map(text_files.is_columnar, chain(*known_files)))):
        rows = (text_files.read(file, lambda _: None) for file in chain(*known_files))
        reading = formats.reading_of(recipe.data)
        formats.refuse_unknown_columns(reading, rows)
        rows = (text_files.read(file, lambda _: None) for file in chain(*known_files))
        if unused := formats.unused_roles(reading, rows):
            print(f"data.roles: no turn has the role {' or '.join(sorted(unused))}", flush=True)
    for path, trained in ((recipe.data.path, True), (recipe.data.validation, False)):
        labels: Counter[object] = Counter()
        for name in names(path):
            files, whole = files_of[name]
            found, unread = Counter[object](), Counter[str]()
            if not reads_columns or recipe.model.vision:  # images in columns are the ranks'
                files = [file for file in files if not text_files.is_columnar(file)]
            for file in files:
                columnar = text_files.is_columnar(file)
                most = STREAMED if columnar or (recipe.data.streaming and trained) else None
                found += check_file(file, *method, most, bad, rendering.check, unread if listed else None)
            labels += found if whole else Counter({UNKNOWN: found.total() if files else 1})
            if trained:
                counts.append(found.total() if whole else None)
            if line := formats.unread_line(name, unread, rendering.template.text if rendering.template else ""):
                print(line, flush=True)
        kinds_of["data.path" if trained else "data.validation"] = labels
    usable = sum(labels.total() for labels in kinds_of.values())
    if bad.count and (recipe.data.bad == "stop" or not kinds_of["data.path"]):
        raise bad.error(usable)
    _check_together(recipe, kinds_of)
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or recipe.data.streaming:
        return None
    return min(sum(known), recipe.data.max_examples or sum(known))


def unchecked(recipe: Recipe) -> str:
    """Return a line with what neither this module nor `--dry-run` reads, and the run checks when it starts."""
    left = []
    for name in names(recipe.data.path) + names(recipe.data.validation):
        columnar = text_files.is_columnar(Path(name))
        if columnar or not Path(name).is_file():
            left.append(name + f" after row {STREAMED:,}" * columnar)
    if recipe.data.streaming:
        left.append(f"examples after the first {STREAMED:,}")
    data = f"{', '.join(left)} (read by the ranks); " if left else ""
    return (
        f"not checked by --dry-run: {data}the lengths of examples in tokens, the number of updates with packing, "
        "and the ranks' software; a run prints examples, with the trained part marked, before it loads the model"
    )


def _check_together(recipe: Recipe, found: Mapping[str, Counter[Any]]) -> None:
    """Refuse data whose examples do not fit together; `found` has their counts by kind, under `data.*` keys."""
    examples = recipe.method.examples
    known = {key: counts for key, counts in found.items() if counts and UNKNOWN not in counts}
    for key, counts in known.items():
        if examples == "judged answers":
            if len(counts) == 1:
                (label,) = counts
                raise UserError(
                    f"{key}: all {counts.total()} answers have the label {str(label).lower()}, but KTO needs good and "
                    f"bad answers; add answers with the label {str(not label).lower()}."
                )
        elif examples == "matching texts":
            classes.check_negatives(key, cast(Counter[int], counts))
    training = known.get("data.path")
    if training and examples == "prompts" and not training[True]:
        for one in own_code.functions("reward", recipe.reward or ""):
            if one.name in COMPARES and Path(one.path) == REWARDS:
                raise UserError(
                    f"data.path: no prompt has an answer, with which the reward {one.name} compares; name the answers' "
                    "column, as in data.columns=answer:completion, or give reward=FILE.py:FUNCTION."
                )
    if training and examples == "matching texts":
        classes.check_pairs("data.path", training.total(), recipe.global_batch_size)
    elif training and examples == "labelled texts":
        classes.check("data.path", training)
        classes.check_known("data.validation", known.get("data.validation", ()), training)


def check_file(
    path: Path,
    method: str,
    data: Data = UNNAMED,
    vision: bool = False,
    most: int | None = None,
    bad: text_files.Bad | None = None,
    also: Callable[[str, formats.Example], object] = lambda where, example: None,
    unread: Counter[str] | None = None,
) -> Counter[Any]:
    """Check a file's first `most` examples (all if None) for a method, and return their number by kind.

    `data` says how they are read. An example's kind is its label, the number of its negatives, or a flag for a prompt's
    answer. With `vision` an example may have images, and every image is opened.
    `bad` is called with the errors of examples, which are otherwise raised, and `also` with every example. `unread`
    counts the keys that nothing reads.
    """
    errors = text_files.BadExamples()

    def note(error: UserError) -> None:
        text_files.refuse(error, bad)
        errors(error)

    place, form = str(path), ""

    def placed() -> Iterator[tuple[str, formats.Example]]:
        nonlocal place, form
        for where, example in formats.prepared(text_files.read(path, note), formats.reading_of(data), note):
            place = where
            if unread is not None:
                with contextlib.suppress(UserError):  # which the conversion raises
                    form = form or formats.form_of(where, example, method, data.form)
                    found = formats.unread(where, example, form, method)
                    unread.update(key for key in found if not (vision and key in images.FIELDS))
            yield where, example

    examples = placed()
    if vision:
        converted = images.checked(images.converted(examples, method, data.form, path.parent, note), note)
    else:
        converted = formats.converted(examples, method, data.form, note)
    found: Counter[object] = Counter()
    for example in islice(converted, most):
        also(place, example)
        kind: object = example.get("label")
        if "fields" in example:
            kind = len(example["messages"]) > example["given"]
        elif "negative" in example:
            kind = len(example["negative"])
        found[kind] += 1
    if not found and not errors.count:
        why = f"data.transform={data.transform} drops all its examples" if data.transform else "is empty"
        raise UserError(f"{path} {why}; add examples, or name another file.")
    return found


if __name__ == "__main__":
    _answer()
