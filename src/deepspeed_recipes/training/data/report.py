"""The report on a tokenized dataset, shown before training: counts, lengths, dropped and masked examples."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ...recipe.errors import counted

BARS = 6
WIDEST = 30
NOT_IN_LOSS = "without a token in the loss; are the answers empty, cut off by truncate, or all marked `train`: false?"
RUNS = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
"""A repeated special token, such as an image's hundreds of placeholders."""
LONGEST_SHOWN = 400
"""Characters shown of each turn."""


@dataclass(frozen=True)
class Report:
    """Counts and lengths of a tokenized dataset."""

    examples: int
    """As read."""
    dropped: int
    """Number of examples longer than the sequence length, which are dropped."""
    unlearnable: int
    """Number of examples without a single token in the loss, which are dropped."""
    extra_pieces: int
    """Pieces beyond one per text, from texts longer than the sequence length."""
    sequences: int
    """Number of training sequences: packed, or one per example."""
    tokens: int
    """Number of tokens in all sequences, without padding."""
    loss_tokens: int
    """Number of tokens in the loss."""
    lengths: tuple[tuple[int, int, int], ...]
    """(shortest, longest, number of kept documents), in equal steps of length."""
    forgetting: int = 0
    """Number of examples from whose earlier turns the chat template removes the reasoning."""
    longest: int = 0
    """Tokens of the longest document, even if it was dropped or cut."""
    cut: int = 0
    """Number of examples of which only the beginning is used."""

    def lines(self, name: str, sequence_length: int, images: bool = False) -> list[str]:
        """Return the report as text for a person; documents with images cannot be cut."""
        share = self.loss_tokens / self.tokens
        learned = "over 99%" if 0.995 <= share < 1 else f"{share:.0%}"
        filled = 100 * self.tokens / (self.sequences * sequence_length)
        first = f"{name}: {counted(self.examples, 'example')}, {self.tokens:,} tokens, {learned} of them in the loss; "
        first += f"{counted(self.sequences, 'sequence')} of at most {sequence_length} tokens, {filled:.0f}% filled"
        notes = []
        if self.dropped:
            notes.append(too_long(name, self.dropped, self.examples, self.longest, sequence_length, not images))
        if self.cut:
            few = f"{self.cut} of {self.examples} examples ({self.cut / self.examples:.0%})"
            notes.append(
                f"warning: {name}: {few} are cut at sequence_length={sequence_length}"
                f"{', and the model does not learn how they end' if name == 'training' else ''}; the longest has "
                f"{self.longest:,} tokens"
            )
        if self.unlearnable:
            few = f"{self.unlearnable} of {self.examples} examples ({self.unlearnable / self.examples:.0%})"
            notes.append(f"warning: {name}: {few} are dropped, {NOT_IN_LOSS}")
        if self.extra_pieces:
            cut = f"cut into {self.examples + self.extra_pieces} pieces"
            notes.append(f"{name}: texts longer than sequence_length={sequence_length} were {cut}")
        if self.forgetting:
            notes.append(f"{name}: in {self.forgetting} examples the chat template removes the earlier reasoning")
        return [first, *notes]

    def bars(self) -> list[str]:
        """Return the histogram as lines of text."""
        most = max(count for *_, count in self.lengths)
        wide = len(str(self.lengths[-1][1]))
        return [
            f"  {low:>{wide}}-{high:<{wide}} tokens  {'#' * -(-WIDEST * count // most):<{WIDEST}}  {count}"
            for low, high, count in self.lengths
        ]


def too_long(
    name: str, dropped: int, examples: int, longest: int, sequence_length: int, can_be_cut: bool = False
) -> str:
    """Return the warning that examples are dropped because they are too long."""
    otherwise = "truncate=true cuts the others" if can_be_cut else "shorten the others"
    share = f"{dropped} of {examples} examples ({dropped / examples:.0%})"
    most = "MOST OF THE DATA IS NOT USED: " if dropped > examples / 2 else ""
    return (
        f"warning: {most}{name}: {share} are dropped, longer than sequence_length={sequence_length}; the longest has "
        f"{longest:,} tokens. {enough(longest)} keeps all, if the model's positions and memory "
        f"allow it; otherwise raise it less, and {otherwise}."
    )


def enough(longest: int) -> str:
    """Return the setting with which an example of `longest` tokens fits, in steps of 64."""
    return f"sequence_length={-(-longest // 64) * 64}"


def left_out(count: int, batch: int) -> str:
    """Return the end of a line on examples of which the last `count` do not fill a batch; empty if all do."""
    return f"; {count} more do not fill a batch of {batch} and are left out" if count else ""


def cut_off(cut: int, texts: int, sequence_length: int) -> str:
    """Return the warning that only a part of some texts is read."""
    return (
        f"warning: training: {cut} of {texts} texts ({cut / texts:.0%}) are cut at sequence_length={sequence_length}; "
        "raise it to read them to their ends"
    )


Pieces = list[tuple[str, bool]]
"""Text, and whether the loss is computed on it."""


def pieces(tokens: Sequence[int], learned: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return a document as text, divided at the boundaries of the loss."""
    edges = [i for i in range(1, len(tokens)) if learned[i] != learned[i - 1]]
    found, half = [], LONGEST_SHOWN // 2
    for start, end in zip([0, *edges], [*edges, len(tokens)], strict=True):
        text = tokenizer.decode(tokens[start:end])
        text = RUNS.sub(lambda run: f"{run[1]} x {len(run[0]) // len(run[1])} ", text)
        text = text if len(text) <= LONGEST_SHOWN else f"{text[:half]} ... {text[-half:]}"
        found.append((text.replace("\n", "\\n"), learned[start]))
    return found
