"""The raw-text corpus: documents about the same world as the chat task, but in other forms.

A base model trained on them learns to copy names and to relate written dates and sums to normalised ones. The corpus
contains no chats and no notices answered with a JSON object, which fine-tuning teaches. Its only JSON describes the
contents of shelves.
"""

import random
from collections.abc import Callable

from . import world

Facts = dict[str, str]


def ledger(facts: Facts) -> str:
    """Write the facts as a line of a ledger."""
    return f"Ledger: {'; '.join(facts.values())}."


def settings(facts: Facts) -> str:
    """Write the facts as lines of a settings file."""
    return "\n".join(f'{key} = "{value}"' for key, value in facts.items())


def tags(facts: Facts) -> str:
    """Write the facts between tags."""
    return "".join(f"<{key}>{value}</{key}>" for key, value in facts.items())


def table(facts: Facts) -> str:
    """Write the facts as a quoted row under a quoted head."""
    head = ",".join(f'"{key}"' for key in facts)
    row = ",".join(f'"{value}"' for value in facts.values())
    return f"{head}\n{row}"


def prose(facts: Facts) -> str:
    """Write the facts as a sentence."""
    return "In short: " + ", ".join(f"the {key} is {value}" for key, value in facts.items()) + "."


RECORDS = (ledger, settings, tags, table, prose)


def filed_notice(rng: random.Random, part: int | None) -> str:
    """Write a notice and then, as a clerk would, the same facts as one or two records."""
    text, facts = world.notice(rng, part)
    styles = rng.sample(RECORDS, rng.choice([1, 1, 2]))
    return "\n".join([text, *(style(facts) for style in styles)])


def jotting(rng: random.Random, part: int | None) -> str:
    """Write one to three facts in random order and without a sentence, and then as a record.

    With so little text, this is where an untrained model learns that records repeat what is above them.
    """
    day, amount, (number, street) = world.any_date(rng), world.any_amount(rng), world.any_street(rng)
    name, city = world.person(rng, part), world.any_city(rng)
    written_date, written_amount = world.write_date_and_amount(rng, day, amount, part)
    facts = {
        "name": (world.write_name(rng, name), name),
        "date": (written_date, day.isoformat()),
        "amount": (written_amount, world.normal_amount(*amount)),
        "street": (world.write_street(rng, number, street), f"{number} {street}"),
        "city": (city, city),
    }
    keys = rng.sample(world.KEYS, rng.choice([1, 1, 2, 3]))
    record = rng.choice(RECORDS)({key: facts[key][1] for key in world.KEYS if key in keys})
    return "; ".join(facts[key][0] for key in keys) + f"\n{record}"


def same_date(rng: random.Random, part: int | None) -> str:
    """Relate written dates to normalised ones."""
    dates = [world.any_date(rng) for _ in range(3)]
    return " ".join(same(rng, world.date_forms(date), date.isoformat()) for date in dates)


def same_amount(rng: random.Random, part: int | None) -> str:
    """Relate written amounts to normalised ones."""
    amounts = [world.any_amount(rng) for _ in range(3)]
    return " ".join(same(rng, world.amount_forms(*amount), world.normal_amount(*amount)) for amount in amounts)


def same(rng: random.Random, forms: dict[str, str], normal: str) -> str:
    """State that a written form means its normal form.

    Every second one is quoted: a token at the start of a value depends on what precedes it.
    """
    written = rng.choice(list(forms.values()))
    return f'{written} is "{normal}".' if rng.random() < 0.5 else f"{written} is {normal}."


def register(rng: random.Random, part: int | None) -> str:
    """Write a list of people and places, and then look each of them up."""
    homes = {world.person(rng, part): world.any_city(rng) for _ in range(3)}
    listing = "; ".join(f"{world.write_name(rng, name)} of {city}" for name, city in homes.items())
    looked_up = rng.sample(list(homes), 3)
    return f"Register: {listing}.\n" + " ".join(f'"{name}" lives in "{homes[name]}".' for name in looked_up)


def shelf(rng: random.Random, part: int | None) -> str:
    """Write the content of a shelf as JSON, a form in which the corpus never writes notices."""
    goods, count = rng.choice(world.GOODS), rng.randrange(2, 60)
    place = f"{rng.choice('ABCDEF')}{rng.randrange(1, 10)}"
    return f'Shelf {place} holds {count} {goods}.\n{{"goods":"{goods}","shelf":"{place}","count":"{count}"}}'


# kind of document: its share of the corpus
KINDS: dict[Callable[[random.Random, int | None], str], float] = {
    filed_notice: 0.66,
    jotting: 0.18,
    same_date: 0.03,
    same_amount: 0.05,
    register: 0.05,
    shelf: 0.03,
}


def document(rng: random.Random, part: int | None = None) -> str:
    """Write one document; `part` chooses the people as in `world.notice`."""
    kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
    return kind(rng, part)
