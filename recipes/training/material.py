"""The data of a run: read, split and mixed, tokenised, and described on the screen as it goes into training."""

from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from recipes.spec.recipe import Recipe
from recipes.training import data, files, sources
from recipes.training.console import marked, say


@dataclass(frozen=True)
class Material:
    """The data of a run."""

    rows: Dataset | data.Stream
    """What training sees."""
    held_out_raw: Dataset | None
    """The held-out examples as read."""
    held_out_rows: Dataset | None
    """The same, tokenised; None for preference pairs, which TRL tokenises."""
    sample: list[int]
    """A row of tokens to compare the export on."""


def load_material(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arguments: Any) -> Material:
    """Read, tokenise and pack; rank 0 first, so that the others find its cache."""
    with arguments.main_process_first(desc="data"):
        training, held_out = load_sources(recipe)
        raw = sources.mix(training, files.weights(recipe.data), recipe.seed)
        held_out_raw = sources.mix(held_out, None, recipe.seed) if held_out else None
        if recipe.method == "dpo":
            say(f"training: {len(raw)} pairs")
            shown = data.pair_examples(raw, tokenizer)
            rows, held_out_rows = raw, None
            sample = tokenizer.apply_chat_template(raw[0]["prompt"], return_dict=True)["input_ids"]
        else:
            rows = tokenized(raw, recipe, tokenizer, "training")
            # One document per row: then the loss of each counts the same whatever stands beside it.
            alone = replace(recipe, packing=False)
            held_out_rows = held_out_raw and tokenized(held_out_raw, alone, tokenizer, "held out")
            first = next(iter(rows))
            sample = first["input_ids"][: first["seq_lengths"][0]]
            shown = data.examples(rows, tokenizer)
        for pieces in shown:
            say(f"example: {marked(pieces)}")
        return Material(rows, held_out_raw, held_out_rows, sample)


def load_sources(recipe: Recipe) -> tuple[list[sources.Source], list[sources.Source]]:
    """Return what to train on and what is held out, and say where it came from."""
    training = sources.read(recipe.data.path, recipe, recipe.data.streaming)
    held_out = sources.read(recipe.data.validation, recipe) if recipe.data.validation else []
    for name, found in (("training", training), ("held out", held_out)):
        for source in found:
            say(f"{name}: {source.line()}")
    if recipe.data.validation_share and not held_out:
        training, held_out = sources.split(training, recipe.data.validation_share, recipe.seed)
        say(f"held out: {sum(len(source.rows) for source in held_out)} of them, by data.validation_share")
    return training, held_out


def tokenized(raw: sources.Rows, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    """Return the rows that `raw` becomes, and say what they are."""
    if not isinstance(raw, Dataset):
        say(f"{name}: tokenised while training, so its size and its lengths are not known")
        return data.stream(raw, recipe, tokenizer)
    rows, counted = data.tokenized(raw, recipe, tokenizer)
    say("\n".join(counted.lines(name, recipe.sequence_length)))
    if name == "training":
        say("\n".join(counted.bars()))
    return rows
