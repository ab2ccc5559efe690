"""The small invented world that the sample data is about: people, places, dates, sums of money, notices.

Everything here is made up from the word lists below (no real persons, no copied text) and is a pure function of the
given `random.Random`. `make_data.py` writes the committed files from it; `pretrain.py` draws more raw text from it.

A *notice* is one or two sentences as a clerk at a counter would write them. Its *facts* are the normalised values:

    text   "Please send the parcel to Dr Ada Norberg, Mill Lane 12, Velmouth, by March 14th, 2025."
    facts  {"name": "Ada Norberg", "date": "2025-03-14", "street": "12 Mill Lane", "city": "Velmouth"}

These conventions give every notice exactly one right answer:

- `date` is ISO 8601. With slashes the month comes first (3/14/2025) unless the year does; with dots the day
  does (14.3.2025).
- `amount` is `1250.00 EUR`: two decimals, a point, no thousands mark, the ISO currency code last. In
  `1.250,00` the comma is the decimal mark; in `1,250` it marks the thousands.
- `name` is given name, family name; titles are dropped. `street` is number first: `12 Mill Lane`.
- A fact that the notice does not state has no key. Goods, order numbers, rooms and clerks are not facts.
"""

import datetime
import random
import zlib


def words(text: str) -> list[str]:
    """Split a word list."""
    return text.split()


GIVEN = words(
    """
    Ada Alma Anton Bela Bodil Bruno Carla Cora Dario Dora Edda Elin Emil Enzo Fanny Felix Flora Frida Greta
    Gus Hanna Henrik Hugo Ida Iris Ivan Jonas Judith Karl Klara Lars Lena Leo Linus Lotte Mara Marta Max Mina
    Nils Nora Olga Oskar Otto Paula Petra Rolf Rosa Ruben Selma Signe Sofia Sven Tilda Tomas Ulla Vera Viktor
    Wanda Yara
    """
)
FAMILY_START = words(
    "Al Bram Brand Dal Ek Fal Gran Hal Hol Kor Lind Lun Mar Nor Ost Quil Ram Sand Stor Tor Ul Vand Wes Zel"
)
FAMILY_END = words("berg by dahl feld gren holm ing kvist land man mark ner sen strom tal vik")
CITY_START = words("Ash Bel Cald Dun El Fen Glan Hav Kel Lor Mor Nev Or Pell Rav Sel Tarn Vel Wyn Yar")
CITY_END = words("beck bridge burg ford ham haven mouth ton vale wick")
STREET_WORD = words(
    """
    Abbey Bell Birch Castle Cherry Church Elm Garden Harbour Hill Lake Market Mill North Oak Park Pine Quarry
    River Rose School South Station Tower
    """
)
STREET_KIND = words("Street Road Lane Square Avenue")
GOODS = words(
    """
    apples books bricks candles chairs cups hats jars lamps maps nails pears pens pipes plates ropes shoes
    stamps
    """
)

MONTHS = words("January February March April May June July August September October November December")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
ONES = words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen
    """
)
TENS = words("- - twenty thirty forty fifty sixty seventy eighty ninety")
# code: (sign, many, hundredths)
CURRENCIES = {
    "EUR": ("€", "euros", "cents"),
    "USD": ("$", "dollars", "cents"),
    "GBP": ("£", "pounds", "pence"),
    "SEK": ("kr ", "kronor", "öre"),
}
KEYS = ("name", "date", "amount", "street", "city")

NOTICES = (
    "{name} ordered {goods} for {amount} on {date}, to be sent to {street}, {city}.",
    "On {date} {name} paid {amount} for {goods}.",
    "Please send the parcel to {name}, {street}, {city}, by {date}.",
    "Delivery for {name}: {goods}, {amount}, due {date} in {city}.",
    "{name} has an appointment in {city} on {date}; the fee is {amount}.",
    "Invoice to {name}, {street}, {city}: {amount}, payable by {date}.",
    "The sum of {amount} was received from {name} on {date}.",
    "{date}: {name} picks up {goods} in {city} and pays {amount}.",
    "We owe {name} of {city} {amount} since {date}.",
    "{name} moved to {street} in {city} on {date}.",
    "Refund {amount} to {name}, who returned {goods} on {date}.",
    "A table for {name} is booked in {city} for {date}, deposit {amount}.",
    "{name} will call at {street}, {city}, on {date} to collect {amount}.",
    "For {goods} {name} from {city} offers {amount}.",
    "The driver leaves {goods} with {name} at {street}, {city}.",
    "Rent for {street}, {city}: {amount}, paid by {name} on {date}.",
    "Reminder: {amount} from {name} was due on {date}.",
    "{name} asks us to deliver {goods} to {street} in {city} on {date}.",
    "Meet {name} on {date} at {street}, {city}.",
    "Bill {amount} to {name} and ship {goods} to {city}.",
    "Dear team, {name} wants {goods} in {city} before {date}, at most {amount}.",
    "Receipt: {amount}, {date}, {name}.",
    "{name} signed for {goods} in {city} on {date}.",
    "To {name}: your order of {goods} costs {amount} and reaches {city} on {date}.",
    "Since {date} {name} lives at {street} in {city}.",
    "Ticket for {name}, {date}, {city}, price {amount}.",
    "The workshop in {city} repairs {goods} for {name} by {date} for {amount}.",
    "{amount} is what {name} paid for {goods} in {city}.",
    "Collect {goods} from {name} at {street} on {date}.",
    "Cancel the visit of {name} in {city} on {date}.",
    "Note: {name}, {street}, {city}, owes {amount}.",
    "Insured parcel, value {amount}, from {name} in {city}, posted {date}.",
)
# The topic of each notice.
TOPICS = words(
    """
    order payment delivery delivery appointment bill payment pickup bill move payment appointment pickup order delivery
    payment bill delivery appointment bill order payment delivery order move appointment order payment pickup
    appointment bill delivery
    """
)
# Added around a notice, never facts: these numbers are not amounts, and the clerks are not customers.
ASIDES = (
    "Order no. {number}.",
    "Ring twice.",
    "Room {small}.",
    "Ask for {given} at the desk.",
    "Ref {number}-{small}.",
    "Handle with care.",
    "It is urgent.",
    "{small} boxes in all.",
    "{given} took the call.",
    "Thank you.",
)


def is_reserved(name: str, part: int) -> bool:
    """Return whether a person, 1 in 16, is reserved for held-out part 0 (extract) or 1 (preferences, text)."""
    return zlib.crc32(name.encode()) % 16 == part


def person(rng: random.Random, part: int | None) -> str:
    """Draw the full name of a person from a held-out part, or from the training files if `part` is None."""
    while True:
        name = f"{rng.choice(GIVEN)} {rng.choice(FAMILY_START)}{rng.choice(FAMILY_END)}"
        if is_reserved(name, part) if part is not None else not (is_reserved(name, 0) or is_reserved(name, 1)):
            return name


def write_name(rng: random.Random, name: str) -> str:
    """Write a name as it occurs in practice: mostly plain, sometimes with a title or family name first."""
    roll = rng.random()
    if roll < 0.15:
        return f"{rng.choice(['Dr', 'Captain', 'Prof.'])} {name}"
    if roll < 0.25:
        given, family = name.split(" ")
        return f"{family}, {given}"
    return name


def ordinal(day: int) -> str:
    """Return `1st`, `2nd`, `3rd`, `4th`, ..., `11th`, `21st`."""
    suffix = "th" if day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def date_forms(date: datetime.date) -> dict[str, str]:
    """Return every written form of a date; all of them mean `date.isoformat()`."""
    day, year, month = date.day, date.year, MONTHS[date.month - 1]
    return {
        "iso": date.isoformat(),
        "day month year": f"{day} {month} {year}",
        "month day, year": f"{month} {day}, {year}",
        "dots, two digits": f"{day:02}.{date.month:02}.{year}",
        "dots": f"{day}.{date.month}.{year}",
        "slashes, month first": f"{date.month}/{day}/{year}",
        "slashes, year first": f"{year}/{date.month}/{day}",
        "day mon year": f"{day} {month[:3]} {year}",
        "mon day, year": f"{month[:3]} {day}, {year}",
        "the day of month": f"the {ordinal(day)} of {month} {year}",
        "month ordinal": f"{month} {ordinal(day)}, {year}",
        "weekday": f"{WEEKDAYS[date.weekday()]}, {day} {month} {year}",
        "two-digit year": f"{day}-{month[:3]}-{year % 100}",
    }


def any_date(rng: random.Random) -> datetime.date:
    """Draw a day of the years 2020 to 2029."""
    return datetime.date(2020, 1, 1) + datetime.timedelta(days=rng.randrange(3653))


def in_words(number: int) -> str:
    """Spell a number from 1 to 99."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")


def amount_forms(hundredths: int, code: str) -> dict[str, str]:
    """Return the written forms of this amount; all mean `normal_amount(hundredths, code)`."""
    sign, many, small = CURRENCIES[code]
    whole, rest = divmod(hundredths, 100)
    english = f"{whole:,}.{rest:02}"
    european = english.translate(str.maketrans(",.", ".,"))
    forms = {
        "normal": f"{whole}.{rest:02} {code}",
        "code first": f"{code} {english}",
        "sign first": f"{sign}{english}",
        "comma, code": f"{european} {code}",
        "comma, sign": f"{european} {sign.strip()}",
    }
    if rest and whole < 100:
        forms["two units"] = f"{whole} {many} and {rest} {small}"
    if not rest:
        forms["whole, unit"] = f"{whole} {many}"
        forms["whole, sign"] = f"{sign}{whole:,}"
        forms["whole, code first"] = f"{code} {whole}"
        forms["whole, code"] = f"{whole} {code}"
    if not rest and whole < 100:
        forms["words"] = f"{in_words(whole)} {many}"
    if not rest and whole >= 1000 and whole % 100 == 0:
        forms["thousands"] = f"{whole // 1000}.{whole // 100 % 10}k {code}"
    return forms


def normal_amount(hundredths: int, code: str) -> str:
    """Return an amount in its normalised form, such as `1250.00 EUR`."""
    return f"{hundredths // 100}.{hundredths % 100:02} {code}"


def any_amount(rng: random.Random) -> tuple[int, str]:
    """Draw an amount: half of them whole, a third below 100, the rest up to 9,999.99."""
    roll = rng.random()
    if roll < 0.35:
        whole = rng.randrange(2, 100)
    elif roll < 0.75:
        whole = rng.randrange(100, 10_000)
    else:
        whole = rng.randrange(10, 100) * 100
    rest = rng.randrange(1, 100) if roll < 0.75 and rng.random() < 0.5 else 0
    return whole * 100 + rest, rng.choice(list(CURRENCIES))


def write_street(rng: random.Random, number: int, street: str) -> str:
    """Write a street address: number first, number last, or with `no.`."""
    return rng.choice([f"{number} {street}", f"{street} {number}", f"{street} no. {number}"])


def any_city(rng: random.Random) -> str:
    """Draw a city."""
    return rng.choice(CITY_START) + rng.choice(CITY_END)


def any_street(rng: random.Random) -> tuple[int, str]:
    """Draw a house number and a street."""
    return rng.randrange(1, 100), f"{rng.choice(STREET_WORD)} {rng.choice(STREET_KIND)}"


def is_withheld(date_form: str, amount_form: str) -> bool:
    """Return whether this pair of date form and amount form is withheld from the training files (1 pair in 8)."""
    return zlib.crc32(f"{date_form}/{amount_form}".encode()) % 8 == 0


def write_date_and_amount(
    rng: random.Random, date: datetime.date, amount: tuple[int, str], part: int | None
) -> tuple[str, str]:
    """Write a date and an amount; the training files never contain the withheld pairs of forms."""
    dates, amounts = date_forms(date), amount_forms(*amount)
    while True:
        date_form, amount_form = rng.choice(list(dates)), rng.choice(list(amounts))
        if part is not None or not is_withheld(date_form, amount_form):
            return dates[date_form], amounts[amount_form]


def aside(rng: random.Random) -> str:
    """Write a sentence that states no fact."""
    return rng.choice(ASIDES).format(
        number=rng.randrange(1000, 10_000), small=rng.randrange(2, 60), given=rng.choice(GIVEN)
    )


def notice(rng: random.Random, part: int | None = None) -> tuple[str, dict[str, str]]:
    """Write one notice and return it with its facts, keys in the order of KEYS.

    `part` selects the people: None for the training files, 0 for extract's held-out file, 1 for the other held-out
    files.
    """
    text, facts, _ = notice_of_topic(rng, part)
    return text, facts


def notice_of_topic(rng: random.Random, part: int | None = None) -> tuple[str, dict[str, str], str]:
    """Write one notice as `notice` does, and return its topic, one of `TOPICS`, in addition."""
    template = rng.choice(NOTICES)
    name, city, day, amount = person(rng, part), any_city(rng), any_date(rng), any_amount(rng)
    number, street = any_street(rng)
    written_date, written_amount = write_date_and_amount(rng, day, amount, part)
    text = template.format(
        name=write_name(rng, name),
        date=written_date,
        amount=written_amount,
        street=write_street(rng, number, street),
        city=city,
        goods=f"{rng.randrange(2, 60)} {rng.choice(GOODS)}",
    )
    text = text[0].upper() + text[1:]
    roll = rng.random()
    if roll < 0.2:
        text = f"{aside(rng)} {text}"
    elif roll < 0.4:
        text = f"{text} {aside(rng)}"
    values = (name, day.isoformat(), normal_amount(*amount), f"{number} {street}", city)
    facts = {key: value for key, value in zip(KEYS, values, strict=True) if f"{{{key}}}" in template}
    return text, facts, dict(zip(NOTICES, TOPICS, strict=True))[template]
