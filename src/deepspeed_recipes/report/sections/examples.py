"""The sections with the training data, with sample answers, and with the best and worst answers in training."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import islice

from ...recipe.errors import redact
from ..page import Bars, Block, Cell, Marked, Note, Section, Table, number
from ..run_data import Row, RunData

MOST_ANSWERS = 3
"""Number of questions shown."""
WORDS = re.compile(r"\w+|\s+|[^\w\s]")
"""The units in which answers are compared."""

Pieces = tuple[tuple[str, str], ...]


def answers(run: RunData) -> Section:
    """Return the sample answers: questions, expected answers, and the model's answers with the differences marked."""
    by_question: dict[object, dict[int, Row]] = {}
    for row in run.answers:
        by_question.setdefault(row.get("prompt"), {})[row["step"]] = row
    special = tuple(map(str, run.data.get("special_tokens") or ()))
    blocks: list[Block] = []
    for at, (question, by_step) in enumerate(islice(by_question.items(), MOST_ANSWERS), 1):
        expected = str(by_step[min(by_step)].get("expected"))
        blocks.append(Marked(f"{at}. Question", ((str(question), ""),), special))
        blocks.append(Marked("expected", ((expected, ""),), special))
        for step in dict.fromkeys((min(by_step), max(by_step))):
            answer = str(by_step[step].get("answer"))
            right = ", right" if answer == expected else ""
            when = "before training" if step == 0 else f"after step {step}"
            blocks.append(Marked(f"{when}{right}", differences(expected, answer), special))
    return Section("Answers before and after", tuple(blocks) or (Note(_why_none(run)),))


def _why_none(run: RunData) -> str:
    recipe = run.recipe
    if recipe.method.name not in ("sft", "distill", "grpo"):
        return f"None: {recipe.method.title} does not measure the answers that the model writes."
    if recipe.layout.pipeline > 1:
        return "None: the stages of a pipeline cannot generate; ds-recipes generate asks the exported model."
    if not run.evaluations:
        return "None: the run has no held-out examples; data.validation=FILE names some."
    if recipe.data.sample_answers == 0:
        return "None: data.sample_answers=0."
    if recipe.method.name == "grpo":
        return "None: held-out answers get a reward and are not kept; ds-recipes generate asks the model."
    return "This run stored none: no held-out example was short enough, the model cannot generate, or it is older."


def differences(expected: str, answer: str) -> Pieces:
    """Return an answer in pieces: text that it lacks is marked `removed`, additional text `added`."""
    left, right = WORDS.findall(expected), WORDS.findall(answer)
    found: list[tuple[str, str]] = []
    for kind, first, last, start, end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        missing, given = "".join(left[first:last]), "".join(right[start:end])
        found += [(given, "")] if kind == "equal" else [(missing, "removed"), (given, "added")]
    return tuple((text, mark) for text, mark in found if text)


COUNTS = {
    "examples": "examples read",
    "dropped": "left out: too long, unusable, or more than fill the last batch",
    "unlearnable": "dropped, without a token in the loss",
    "extra_pieces": "pieces beyond one per text",
    "sequences": "sequences",
    "tokens": "tokens",
    "loss_tokens": "tokens in the loss",
}
"""Keys of data.json with their descriptions."""
ALWAYS = ("examples", "dropped", "sequences", "tokens", "loss_tokens")
"""Counts that are shown even if they are 0."""


def data(run: RunData) -> Section:
    """Return the training data: sources, counts, lengths, and examples with the tokens in the loss marked."""
    training, settings = run.data.get("training") or {}, run.recipe.data
    sources = {"training data": settings.path, "held-out data": settings.validation}
    rows: list[tuple[Cell, ...]] = [(what, redact(path)) for what, path in sources.items() if path]
    blocks: list[Block] = [Table(("", ""), tuple(rows))] if rows else []
    sets = [name for name in ("training", "held_out") if run.data.get(name)]
    counts: list[tuple[Cell, ...]] = []
    for key, label in COUNTS.items():
        found = [run.data[name].get(key) for name in sets]
        if any(found) or (key in ALWAYS and any(one is not None for one in found)):
            counts.append((label, *(run.number(f"data.json:{name}.{key}", ",d") for name in sets)))
    if room := training.get("sequences", 0) * run.recipe.sequence_length:
        filled = number(training.get("tokens", 0) / room, ".1%", "data.json:filled")
        empty = (None for _ in sets[1:])
        counts.append((f"of {run.recipe.sequence_length:,} tokens per sequence filled", filled, *empty))
    if counts:
        blocks.append(Table(("", *(name.replace("_", " ") for name in sets)), tuple(counts)))
    for name, skipped in (run.data.get("skipped") or {}).items():
        blocks.append(
            Note(f"{skipped['count']:,} examples of {redact(name)} were left out (data.bad=skip); the first:")
        )
        blocks.append(Marked("Errors", ((redact("\n".join(skipped["first"])), ""),)))
    if not training:
        blocks.append(Note("Counts and lengths were not recorded: a stream, or an older run."))
    lengths = (
        (f"{low}-{high}", run.number(f"data.json:training.lengths.{at}.2", ",d"))
        for at, (low, high, _) in enumerate(training.get("lengths") or ())
    )
    if bars := tuple((label, (("documents", one),)) for label, one in lengths if one):
        blocks.append(Bars("Documents by their length in tokens", bars))
    for at, pieces in enumerate(run.data.get("shown") or ()):
        marked = tuple((str(text), "loss" if learned else "") for text, learned in pieces)
        what = "Example; marked text is in the loss, framed text is a special token" if not at else "Another example"
        blocks.append(Marked(what, marked, tuple(map(str, run.data.get("special_tokens") or ()))))
    return Section("Data", tuple(blocks))


SHOWN = 3
"""Number of logged steps whose best and worst answers are shown: the first, one in the middle, and the last."""


def rollouts(run: RunData) -> Iterator[Section]:
    """Yield the section with the best and worst training answers, if the run learns from its own answers."""
    if not run.rollouts:
        return
    steps = sorted({row["step"] for row in run.rollouts})
    chosen = {steps[round(part * (len(steps) - 1) / (SHOWN - 1))] for part in range(SHOWN)}
    blocks: list[Block] = []
    for row in run.rollouts:
        if row["step"] in chosen:
            each = ", ".join(f"{name} {value:.3g}" for name, value in row["rewards"].items())
            reward = f"reward {row['reward']:.3g}" + (f" ({each})" if len(row["rewards"]) > 1 else "")
            prompt = f"Step {row['step']}, {row['which']}: {reward}. Prompt"
            blocks += [Marked(prompt, ((str(row["prompt"]), ""),)), Marked("answer", ((str(row["answer"]), ""),))]
    cells = tuple(
        (
            number(row["step"], ",d", f"rollouts.jsonl:{at}:step"),
            row["which"],
            number(row["reward"], ".3f", f"rollouts.jsonl:{at}:reward"),
        )
        for at, row in enumerate(run.rollouts, 1)
    )
    blocks.append(
        Table(("step", "which", "reward"), cells, folded="Rewards of the best and worst answers: rollouts.jsonl")
    )
    yield Section("Best and worst answers in training", tuple(blocks))
