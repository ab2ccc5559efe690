"""Checks a recipe with its DeepSpeed file and number of ranks by the table of `compatibility`, and finds what runs."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import pairwise

from . import compatibility
from .compatibility import Case
from .deepspeed_file import DeepSpeedFile
from .errors import UserError
from .files import text_of
from .layout import gradient_accumulation_steps
from .methods import Distill
from .recipe import Layout, Recipe, changed

NODE = 8
"""GPUs per node, if no instance type gives their number."""
SPLITS = {
    "tensor": ("layers", "tensor_parallel.autotp_size"),
    "expert": ("experts", "expert_parallel.autoep_size"),
    "sequence": ("sequences", "sequence_parallel_size"),
}
"""What a layout's size splits where a DeepSpeed file may name it too, and the file's key."""


def check(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> None:
    """Refuse a recipe that cannot run on `world_size` ranks, and name the nearest layout that can.

    Dimensions that are missing in the recipe's `model.config` are not checked.
    """
    case = Case(recipe, file, world_size)
    compatibility.check(case, "model")
    compatibility.check(case, "run")
    if why := _layout_limit(recipe, world_size, file):
        use = " or ".join(suggestions(recipe, world_size, file))
        raise UserError(f"{as_overrides(recipe.layout)}: {why}; use {use}.")
    gradient_accumulation_steps(recipe, world_size)


def check_blocks(recipe: Recipe, file: DeepSpeedFile) -> list[str]:
    """Refuse a file whose parallel blocks contradict the layout, or that lacks the block which the layout needs.

    Return a line for each size in the file that the layout overrides, and for a layout that only its name promises.
    """
    if recipe.layout.expert > 1 and not file.has_expert_block:
        raise UserError(
            f"layout.expert={recipe.layout.expert}: {file.name} has no expert_parallel block; use "
            "deepspeed=expert_parallel.json."
        )
    if recipe.layout.expert > 1 and file.stage == 0:
        # DeepSpeed clips at the mean of the ranks' norms: `test_deepspeed_averages_the_norms_of_different_experts`.
        raise UserError(
            f"layout.expert={recipe.layout.expert}: without ZeRO, DeepSpeed computes the wrong gradient norm; set "
            f"zero_optimization.stage to 1 in {file.name}, which also needs less memory."
        )
    lines = []
    for field, size, asked in sizes(recipe.layout, file):
        what, key = SPLITS[field]
        if asked == 1:
            added = changed(recipe, layout=replace(recipe.layout, **{field: size}))
            why = "this recipe cannot"
            if added is not None:
                why = next(compatibility.reasons(Case(added, file, size), {f"layout.{field}>1"}), "")
            use = f"{why}; use deepspeed=zero{file.stage}.json" if why else f"add layout.{field}={size}"
            raise UserError(f"deepspeed={file.name} splits {what} over {size} ranks; {use}.")
        lines.append(f"layout.{field}={asked}: the run uses this size instead of {key}={size} in {file.name}.")
    for key, value in file.content.get("tensor_parallel", {}).items():
        if key == "autotp_size" or (key, value) == ("vocab_parallel_lm_head", False):  # a run's own file has these
            continue
        raise UserError(
            f"deepspeed={file.name}: tensor_parallel.{key} is for DeepSpeed's AutoTP, and a run splits layers by the "
            "model's own plan; remove it."
        )
    field = {"pipeline.json": "pipeline", "sequence_parallel.json": "sequence"}.get(file.name, "")
    if field and getattr(recipe.layout, field) == 1:
        lines.append(f"deepspeed={file.name} alone splits nothing, and is ZeRO-{file.stage}; add layout.{field}=2.")
    return lines


def check_micro_batch(recipe: Recipe) -> None:
    """Refuse fewer sequences on a rank than the method compares."""
    least = recipe.method.least_micro_batch
    if recipe.micro_batch_size < least:
        raise UserError(
            f"micro_batch_size={recipe.micro_batch_size}: {recipe.method.title} compares the answers of a micro-batch; "
            f"use micro_batch_size={least} or more."
        )


def trained_share(recipe: Recipe, counts: Mapping[str, int]) -> float:
    """Return the share of a model's parameters that `train` and `freeze`, without adapters, leave to be trained.

    `counts` is the number of parameters of each weight, by its name. Every expression has to match some and not all of
    them, and so has each of its alternatives.
    """
    some = ", ".join(list(counts)[:1] + list(counts)[-1:])
    text = text_of(recipe.model.config)
    for key in ("train", "freeze"):
        if (pattern := getattr(recipe, key)) is None:
            continue
        for part, alone in [(pattern, re.compile(pattern)), *_alternatives("", pattern, "")]:
            found = sum(alone.search(name) is not None for name in counts)
            which = "matches" if part == pattern else f"{part!r} in it matches"
            if not found and text.get("tie_word_embeddings") and alone.search("lm_head.weight"):
                tied = next(iter(counts))  # the embeddings come first
                raise UserError(
                    f"{key}={pattern}: {which} no weight, since this model's lm_head is tied to {tied}; write that "
                    "name for both, or leave them out."
                )
            if not found or (part == pattern and found == len(counts)):
                what = f"all {found} weights of the model" if found else "no weight of the model"
                raise UserError(f"{key}={pattern}: {which} {what}, whose names are {some} and so on.")
    trained = sum(count for name, count in counts.items() if recipe.trains(name))
    if not trained:
        raise UserError(f"train={recipe.train} freeze={recipe.freeze}: nothing is left to train.")
    return trained / sum(counts.values())


_MEANT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|<[=!]|[aiLmsux-]*:|[=!>]))?|\)|\|", re.DOTALL)
"""Marks of groups and alternatives in a regular expression, and what only looks like them: escapes and classes."""


def _alternatives(before: str, pattern: str, after: str) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield each alternative of a regular expression, also in groups, with the expression that has no other there.

    `before` and `after` are around `pattern`. Groups that must not match are left out.
    """
    parts, depth, groups = [0], 0, list[tuple[int, int]]()
    for found in _MEANT.finditer(pattern):
        if found[0].startswith("("):
            depth += 1
            if depth == 1:
                groups.append((found.end(), -1 if "!" in found[0] else 0))
        elif found[0] == ")":
            depth -= 1
            if depth == 0 and groups[-1][1] == 0:
                groups[-1] = (groups[-1][0], found.start())
        elif found[0] == "|" and depth == 0:
            parts.append(found.end())
    for start, end in pairwise([*parts, len(pattern) + 1]):
        if len(parts) > 1:
            with contextlib.suppress(re.error):  # it may refer to a group that is left out
                yield pattern[start : end - 1], re.compile(before + pattern[start : end - 1] + after)
        for first, last in groups:
            if start <= first <= last < end:
                around = before + pattern[start:first], pattern[last : end - 1] + after
                yield from _alternatives(around[0], pattern[first:last], around[1])


def sizes(layout: Layout, file: DeepSpeedFile) -> Iterator[tuple[str, int, int]]:
    """Yield each size in a file that is not the layout's: the layout's field, the file's size, the layout's."""
    for field in SPLITS:
        size, asked = getattr(file, f"{field}_size"), getattr(layout, field)
        if 1 < size != asked:
            yield field, size, asked


def limit(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> str | None:
    """Return the first reason why `recipe` cannot run, as a clause, or None if it can."""
    return next(compatibility.reasons(Case(recipe, file, world_size)), None)


def _layout_limit(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> str | None:
    """Return the first reason that another layout or number of ranks may answer, or None."""
    return next(compatibility.reasons(Case(recipe, file, world_size), compatibility.LAYOUT), None)


def suggestions(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> list[str]:
    """Return the smallest changes with which `recipe` can run, as typed by the user; each one is sufficient.

    The first changes the layout; another number of ranks and the pipeline's DeepSpeed file follow if they help.
    """
    near = nearest(recipe, world_size, file)
    found = [as_overrides(near, recipe.layout)]
    if any(asked == 1 for *_, asked in sizes(near, file)):  # `check_blocks` would refuse it
        found[0] += f" deepspeed=zero{file.stage}.json"
    layout = recipe.layout
    multiple = math.lcm(layout.tensor * layout.pipeline * layout.sequence, layout.expert)
    below = max(1, world_size // multiple) * multiple
    world_sizes = {below, (world_size // multiple + 1) * multiple} - {world_size}
    for size in sorted(world_sizes):
        if _runs(recipe, size, file):
            one_node = size < 2 * NODE or size % NODE
            found.append(f"--gpus {size}" if one_node else f"--gpus {NODE} --nodes {size // NODE}")
    if recipe.layout.pipeline > 1 and _layout_limit(recipe, world_size, DeepSpeedFile(stage=1)) is None:
        found.append("deepspeed=pipeline.json")
    return found


def _runs(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> bool:
    """Return True if `check` accepts a recipe's layout and its global batch can be divided."""
    if _layout_limit(recipe, world_size, file) is not None:
        return False
    try:
        gradient_accumulation_steps(recipe, world_size)
    except UserError:
        return False
    return True


def nearest(recipe: Recipe, world_size: int, file: DeepSpeedFile) -> Layout:
    """Return the layout that can run and is closest to the recipe's, counted in doublings of its sizes.

    There always is one, since data parallelism alone can always run. Layouts that divide the global batch come first.
    """
    wanted = asdict(recipe.layout).values()

    def distance(layout: Layout) -> tuple[float, int]:
        sizes = asdict(layout).values()
        doublings = sum(abs(math.log2(size / asked)) for size, asked in zip(sizes, wanted, strict=True))
        return round(doublings, 9), -math.prod(sizes)

    layouts = [
        Layout(tensor, pipeline, sequence, expert)
        for tensor in divisors(world_size)
        for pipeline in divisors(world_size // tensor)
        for sequence in divisors(world_size // tensor // pipeline)
        for expert in divisors(world_size // tensor // pipeline // sequence)
    ]
    ordered = sorted(layouts, key=distance)
    recipes = [one for layout in ordered if (one := changed(recipe, layout=layout)) is not None]
    possible = (one for one in recipes if _layout_limit(one, world_size, file) is None)
    runs = next((one for one in recipes if _runs(one, world_size, file)), None)
    found = runs or next(possible, None)
    assert found is not None, "data parallelism alone is always possible"
    return found.layout


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def as_overrides(layout: Layout, before: Layout | None = None) -> str:
    """Return the sizes as `key=value` words: those above 1, or those that differ from `before`."""
    old = asdict(before or Layout())
    return " ".join(f"layout.{name}={size}" for name, size in asdict(layout).items() if size != old[name])


PER_ENTRY = 14
"""Bytes that whole logits take at their peak per token and vocabulary entry: in bf16 and in fp32, and the gradients of
both; `tests/test_levers.py` counts them."""
LARGE = 2**30
"""Size of whole logits, in bytes, above which tiles are worth another product with the output matrix."""


def are_large(tokens: float, vocabulary: int) -> bool:
    """Return True if whole logits of this many tokens are large enough to avoid."""
    return PER_ENTRY * tokens * vocabulary >= LARGE


def asked_for(recipe: Recipe) -> bool | None:
    """Return True or False if a recipe sets tiles on or off, or None if it depends on the size of the logits."""
    if recipe.method.whole_loss or recipe.layout.pipeline > 1 or recipe.router_aux_loss_coef or recipe.model.vision:
        return False  # tiles do not apply to these, or would compute a wrong loss: see `Recipe`
    if recipe.loss or recipe.model.train_mtp:
        return False  # the user's function reads whole logits, and that head the hidden states of all tokens
    return True if isinstance(recipe.method, Distill) else recipe.tiled_loss


def tiles_loss(recipe: Recipe, vocabulary: int) -> bool:
    """Return True if a run computes its loss in tiles: because of `tiled_loss`, or because whole logits are large."""
    asked = asked_for(recipe)
    tokens = recipe.micro_batch_size * recipe.sequence_length / recipe.layout.sequence
    return are_large(tokens, vocabulary) if asked is None else asked
