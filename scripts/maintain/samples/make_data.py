"""Writes the sample data: the chat task with its pairs and judged answers, raw text, labelled and matching texts.

Standard library only.

    python -m scripts.maintain.samples.make_data   # writes samples/{extract,preferences,...}/*.jsonl
    python -m scripts.maintain.samples.make_data --output /tmp/samples --seed 7

With the default seed, the files equal the committed ones byte for byte. It takes a few seconds.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed_recipes.recipe.project import SAMPLES

from . import corpus, world

SEED = 2025
COUNTS = {
    "extract/train": 6000,
    "extract/held_out": 400,
    "preferences/train": 2000,
    "preferences/held_out": 200,
    "text/train": 6000,
    "text/held_out": 300,
    "judged/train": 2000,
    "judged/held_out": 200,
    "labelled/train": 2000,
    "labelled/held_out": 300,
    "matching/train": 1600,
    "matching/held_out": 200,
}
FIELDS = ("name", "date", "amount", "city")
"""The keys of an answer, in their order; a fact that the notice does not state has no key."""
Make = Callable[[random.Random, int | None], tuple[dict, list[str]]]


def compact(value: object) -> str:
    """Return JSON without spaces, the only correct form of an answer."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def fields(facts: dict[str, str]) -> dict[str, str]:
    """Return the facts that belong in an answer: an amount without its currency, an address as its city."""
    return {key: facts[key].split(" ")[0] if key == "amount" else facts[key] for key in FIELDS if key in facts}


def extract(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one conversation: a notice, answered with its facts."""
    text, facts = world.notice(rng, part)
    answer = compact(fields(facts))
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"messages": messages}, [text, answer]


def swap_date(facts: dict[str, str]) -> str | None:
    """Swap month and day; None if that is not a mistake or not a date."""
    if "date" not in facts:
        return None
    year, month, day = facts["date"].split("-")
    return None if month == day else compact(facts | {"date": f"{year}-{day}-{month}"})


def bare_number(facts: dict[str, str]) -> str | None:
    """Write the amount as a number, not as text, which loses its trailing zeros."""
    return compact(facts | {"amount": float(facts["amount"])}) if "amount" in facts else None


def shift_decimals(facts: dict[str, str]) -> str | None:
    """Misread the decimal mark: 45.50 becomes 4550.00."""
    if "amount" not in facts:
        return None
    return compact(facts | {"amount": f"{facts['amount'].replace('.', '')}.00"})


def reverse_keys(facts: dict[str, str]) -> str | None:
    """Give the keys in the wrong order."""
    return compact(dict(reversed(facts.items())))


def lose_a_key(facts: dict[str, str]) -> str | None:
    """Omit the last fact."""
    return compact(dict(list(facts.items())[:-1]))


def family_first(facts: dict[str, str]) -> str | None:
    """Leave the name as `Family, Given`."""
    given, family = facts["name"].split(" ")
    return compact(facts | {"name": f"{family}, {given}"})


def talk_around(facts: dict[str, str]) -> str | None:
    """Put prose around the JSON."""
    return f"Here is the answer: {compact(facts)}"


def add_spaces(facts: dict[str, str]) -> str | None:
    """Write the JSON with spaces."""
    return json.dumps(facts, ensure_ascii=False)


MISTAKES = (
    swap_date,
    bare_number,
    shift_decimals,
    reverse_keys,
    lose_a_key,
    family_first,
    talk_around,
    add_spaces,
)


def preference(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one pair: the right answer, and one with a mistake that a half-trained model makes."""
    text, facts = world.notice(rng, part)
    facts = fields(facts)
    answer, wrong = compact(facts), None
    while wrong is None:
        wrong = rng.choice(MISTAKES)(facts)
    pair = {
        "prompt": [{"role": "user", "content": text}],
        "chosen": [{"role": "assistant", "content": answer}],
        "rejected": [{"role": "assistant", "content": wrong}],
    }
    return pair, [text, answer]


def judged(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one judged answer: the right one or, half of the time, one with a mistake."""
    pair, keys = preference(rng, part)
    label = rng.random() < 0.5
    return {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}, keys


def document(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one document of raw text."""
    text = corpus.document(rng, part)
    return {"text": text}, [text]


def labelled(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one notice labelled with its topic."""
    text, _, topic = world.notice_of_topic(rng, part)
    return {"text": text, "label": topic}, [text]


def matching(rng: random.Random, part: int | None) -> tuple[dict, list[str]]:
    """Make one pair: a notice's normalised facts without the name as the query, and the notice to find."""
    text, facts = world.notice(rng, part)
    query = "; ".join(facts[key] for key in world.KEYS[1:] if key in facts)
    return {"anchor": query, "positive": text}, [text, query]


# file: (how one example is made, the reserved people it draws from)
FILES: dict[str, tuple[Make, int | None]] = {
    "extract/train": (extract, None),
    "extract/held_out": (extract, 0),
    "preferences/train": (preference, None),
    "preferences/held_out": (preference, 1),
    "text/train": (document, None),
    "text/held_out": (document, 1),
    "judged/train": (judged, None),
    "judged/held_out": (judged, 1),
    "labelled/train": (labelled, None),
    "labelled/held_out": (labelled, 1),
    "matching/train": (matching, None),
    "matching/held_out": (matching, 1),
}


def rows(name: str, seed: int, seen: set[str]) -> Iterator[dict]:
    """Yield a file's examples; an example whose text or answer is in `seen` is drawn again."""
    make, part = FILES[name]
    rng = random.Random(f"{seed}/{name}")
    left = COUNTS[name]
    while left:
        row, keys = make(rng, part)
        if seen.isdisjoint(keys):
            seen.update(keys)
            left -= 1
            yield row


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and write the files."""
    parser = argparse.ArgumentParser(
        description="Write the sample data. The same seed gives the same bytes, on every machine.",
        epilog="Example: python -m scripts.maintain.samples.make_data --output /tmp/samples --seed 7",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLES,
        help="folder to write into (default: the samples of the package)",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"another seed gives other people and amounts (default: {SEED})"
    )
    options = parser.parse_args(arguments)
    seen: set[str] = set()  # no text and no answer occurs twice, in one file or in two
    for name, count in COUNTS.items():
        path = options.output / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) for row in rows(name, options.seed, seen)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
        print(f"{path}: {count} examples")


if __name__ == "__main__":
    main()
