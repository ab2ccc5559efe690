"""Loads a run's datasets: reads, mixes and splits the sources, and prints what goes into training."""

from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ...recipe.errors import counted
from ...recipe.files import Json, JsonView
from ...recipe.recipe import Recipe
from ..console import say, show
from . import sources, text_files, tokenize, updates
from .report import Report
from .tokenize import Stream

HELD_OUT_SEED = 42
"""Seed of the held-out examples, the same whatever `seed` is, so that runs with different seeds compare."""
SKIPPED: dict[str, Json] = {}
"""Examples that `data.bad=skip` has left out, by source: their `count`, and the `first` ten errors."""


@dataclass(frozen=True)
class Datasets:
    """A run's training and held-out data."""

    training: Dataset | Stream
    """Sequences of tokens, or examples where the method's own trainer tokenizes them."""
    held_out: Dataset | None
    """The held-out examples as read."""
    held_out_sequences: Dataset | None
    """The same, tokenized, or None where the method's own trainer tokenizes."""
    sample: list[int]
    """One sequence of tokens, to compare the export on."""
    size: updates.Size | None = None
    """Size of the training data, or None for a stream."""
    description: JsonView = field(default_factory=dict)
    """Content of the run folder's data.json: `training` and `held_out`, each a `Report` or None, and examples as
    `Pieces`, `shown`."""
    labels: tuple[str, ...] = ()
    """The names of a classifier's classes, in the order of its outputs."""
    shown: JsonView | None = None
    """The sequence of `sample`, if it has images."""

    @property
    def judged(self) -> Dataset | None:
        """The held-out examples that count: where the run tokenizes them, as tokens, without those that are too long.

        A method that tokenizes by itself gets the examples as they were read.
        """
        return self.held_out if self.held_out_sequences is None else self.held_out_sequences

    def described(self, tokenizer: PreTrainedTokenizerBase) -> Json:
        """Return `description` with the special tokens in its examples, and with counts where no `Report` has them."""
        text = "".join(text for pieces in self.description.get("shown") or () for text, _ in pieces)
        special = sorted(token for token in tokenizer.get_added_vocab() if token.strip() and token in text)
        counts: Json = {}
        if self.size is not None and "training" not in self.description:
            left_out = self.size.examples - self.size.documents
            counts["training"] = {"examples": self.size.examples, "dropped": left_out}
        if self.held_out is not None and "held_out" not in self.description:
            counts["held_out"] = {"examples": len(self.held_out)}
        return {**self.description, **counts, "special_tokens": special}


def read_examples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[sources.Examples, Dataset | None]:
    """Return the training and the held-out examples; print their sources, and the keys that nothing reads."""
    template = str(tokenizer.chat_template) if tokenizer else ""
    training = sources.read(recipe.data.path, recipe, recipe.data.streaming)
    held_out = sources.read(recipe.data.validation, recipe) if recipe.data.validation else []
    for name, found in (("training", training), ("held out", held_out)):
        for source in found:
            say(f"{name}: {source.line()}")
            if source.skipped:
                SKIPPED[source.name] = {"count": len(source.skipped), "first": list(source.skipped[:10])}
                say(f"warning: {name}: {len(source.skipped)} examples of {source.name} are left out by data.bad=skip")
                say("\n".join(SKIPPED[source.name]["first"]))
            if unread := source.unread_line(template):
                say(f"{name}: {unread}")
            for warning in sources.unread_files(source, recipe.data, recipe.model.vision):
                say(warning)
    for line in sources.repeated(training, held_out, recipe.seed):
        say(line)
    if recipe.data.validation_share and not held_out:
        training, held_out = _split(training, recipe)
    shares = text_files.weights(recipe.data)
    mixed = sources.mix(training, shares, recipe.seed)
    if shares and isinstance(mixed, Dataset):
        parts = (
            f"{share:.0%} of them from {source.short} ({share * len(mixed) / len(source.examples):.2g} times each)"
            for source, share in zip(training, shares, strict=True)
        )
        say(f"training: {len(mixed):,} examples by data.weights, on average {', '.join(parts)}")
    most = recipe.data.max_examples
    if most is not None and isinstance(mixed, Dataset) and most < len(mixed):
        say(f"training: {most} of {len(mixed)} examples, by data.max_examples, drawn with seed {recipe.seed}")
        mixed = sources.draw(mixed, most, recipe.seed)
    return mixed, sources.mix(held_out, None, recipe.seed) if held_out else None


def _split(found: list[sources.Source], recipe: Recipe) -> tuple[list[sources.Source], list[sources.Source]]:
    """Return (training, held out) according to `data.validation_share`, and print the number of held-out examples.

    The draw does not depend on the recipe's seed, so that runs compare.
    """
    share = recipe.data.validation_share

    def has_both(judged: list[sources.Source]) -> bool:
        return len({label for source in judged for label in source.examples["label"]}) > 1

    training, held_out = sources.split(found, share, HELD_OUT_SEED)
    # The metric of judged answers compares good ones with bad ones, so a draw that has both is preferred. A draw hashes
    # every example, so none is repeated in vain: where nothing is held out, or all are judged alike.
    if held_out and recipe.method.examples == "judged answers" and has_both([*training, *held_out]):
        for seed in range(HELD_OUT_SEED + 1, HELD_OUT_SEED + 100):
            if has_both(held_out):
                break
            training, held_out = sources.split(found, share, seed)
    count, out = sources.count(found), sources.count(held_out)
    if share != "auto":
        say(f"held out: {counted(out, 'example')}, by data.validation_share")
    elif held_out:
        say(
            f"held out: {out:,} of {counted(count, 'example')}, the same ones whatever the seed; data.validation=FILE "
            "names others, and data.validation=none holds out none"
        )
    else:
        few = f", and {updates.FEW[0]:.0%} of {count} is less than one" if count * updates.FEW[0] < 1 else ""
        fifth = ", and data.validation_share=0.2 holds out a fifth" if few and len(found) == 1 and count >= 5 else ""
        say(
            f"held out: none{few}, so nothing will measure the model on examples that it was not trained on; "
            f"data.validation=FILE names some{fifth}"
        )
    return training, held_out


def tokenized_datasets(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Datasets:
    """Return the datasets of a method that trains on tokens with labels, by `tokenize.tokenized`."""
    if recipe.method.name == "pretrain" and tokenizer.eos_token is None:
        say(f"model.path={recipe.model.path}: its tokenizer has no end token (eos_token), so documents end without one")
    examples, held_out = read_examples(recipe, tokenizer)
    sequences, report = _tokenized(examples, recipe, tokenizer, "training")
    held_out_sequences, held_out_report = None, None
    if held_out:
        held_out_sequences, held_out_report = _tokenized(held_out, tokenize.alone(recipe), tokenizer, "held out")
    shown = tokenize.first_documents(sequences, tokenizer)
    show(shown)
    size = None
    if report:
        documents = sum(count for *_, count in report.lengths)
        size = updates.Size(report.examples, documents, report.sequences, report.tokens)
    first = next(iter(sequences))
    if recipe.model.vision:
        first = next((one for one in sequences if one["images"]), first)
    return Datasets(
        training=sequences,
        held_out=held_out,
        held_out_sequences=held_out_sequences,
        sample=first["input_ids"][: first["seq_lengths"][0]],
        shown=first if recipe.model.vision else None,
        size=size,
        description={
            "training": asdict(report) if report else None,
            "held_out": asdict(held_out_report) if held_out_report else None,
            "shown": shown,
        },
    )


def _tokenized(
    examples: sources.Examples, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[Any, Report | None]:
    """Return the sequences of `examples` and the report on them, None for a stream; print it."""
    if not isinstance(examples, Dataset):
        say(f"{name}: tokenized during training, so its size and lengths are unknown")
        return tokenize.stream(examples, recipe, tokenizer), None
    key = "data.path" if name == "training" else "held-out examples (data.validation names others, or none)"
    sequences, report = tokenize.tokenized(examples, recipe, tokenizer, key)
    say("\n".join(report.lines(name, recipe.sequence_length, recipe.model.vision)))
    if name == "training":
        say("\n".join(report.bars()))
    return sequences, report
