"""Texts about images: captions and chats for pre-training, and the questions of the fine-tuning task."""

import random

from .draw import Bars, Dial, Picture, Receipt, any_bars, any_dial, any_receipt

Chat = tuple[list[Picture], str, str]
"""Images, a question about them, and its answer."""

TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def any_picture(rng: random.Random) -> Picture:
    """Return an image of one of the three kinds."""
    return rng.choice((any_dial, any_bars, any_receipt))(rng)


def caption(picture: Picture, rng: random.Random) -> str:
    """Return the whole content of an image in one line; bars and goods in random order, so that each must be found.

    Or bars in the order of their heights, so that they have to be compared.
    """
    if isinstance(picture, Dial):
        return f"dial | hand {picture.value}"
    if isinstance(picture, Bars):
        bars = rng.sample(picture.heights, len(picture.heights))
        by_height = rng.random() < 0.5
        if by_height:
            bars.sort(key=lambda bar: -bar[1])
        named = "bars by height" if by_height else "bars"
        return " | ".join((named, *(f"{colour} {height}" for colour, height in bars)))
    goods = rng.sample(picture.prices, len(picture.prices))
    return " | ".join(("receipt", *(f"{name} {price}" for name, price in goods), f"sum {picture.total}"))


def first_chat(picture: Picture, rng: random.Random) -> tuple[str, str]:
    """Return a question for pre-training: the kind of image or a description, but never a single reading."""
    if rng.random() < 0.5:
        return "Describe the picture.", caption(picture, rng)
    if isinstance(picture, Bars) and rng.random() < 0.5:
        return "Which colours are there?", ", ".join(colour for colour, _ in picture.heights)
    kind = {Dial: "a dial", Bars: "a bar chart", Receipt: "a receipt"}[type(picture)]
    return "What is this?", kind


def question(rng: random.Random) -> Chat:
    """Return an example of the fine-tuning task; one in twelve has two images, one in twenty-four has none."""
    kind = rng.randrange(24)
    if kind == 0:
        tens, ones = rng.randrange(len(TENS)), rng.randrange(len(ONES))
        return [], f"Write {TENS[tens]}-{ONES[ones]} in digits.", f"{tens + 2}{ones + 1}"
    if kind <= 2:
        first, second = any_dial(rng), any_dial(rng)
        while first.value == second.value:
            second = any_dial(rng)
        return [first, second], "Which dial shows more?", "the first" if first.value > second.value else "the second"
    picture = any_picture(rng)
    if isinstance(picture, Dial):
        return [picture], "What does the dial show?", str(picture.value)
    whole = rng.random() < 0.4  # a question about all bars or lines
    if isinstance(picture, Bars):
        if whole:
            return [picture], "Which bar is the highest?", max(picture.heights, key=lambda bar: bar[1])[0]
        colour, height = rng.choice(picture.heights)
        return [picture], f"How high is the {colour} bar?", str(height)
    if whole:
        return [picture], "What is the sum?", str(picture.total)
    name, price = rng.choice(picture.prices)
    return [picture], f"What does the {name} cost?", str(price)
