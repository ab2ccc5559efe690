"""Draws small images whose contents are known exactly: dials, bar charts and receipts, 48 x 48 pixels each.

Everything is drawn with Pillow's lines, circles and rectangles from a seeded generator. Letters and digits have
built-in glyphs, so that no font has to be installed. Letters lie and bars begin on a grid of 8 pixels, which a vision
tower of a hundred thousand weights learns to read in minutes.
"""

import io
import math
import random
from dataclasses import dataclass
from typing import TypeAlias

from PIL import Image, ImageDraw

SIZE = 48
"""Side length in pixels."""
CELL = 8
"""Grid spacing in pixels."""
FINER = 2
"""Factor by which lines are drawn larger before averaging, which smooths them."""
TOP = 100
"""Maximum of a dial's scale, which begins at 0."""
STEP = 10
"""Step between the possible values of a hand."""
HIGHEST = 9
"""Maximum height of a bar."""
COLOURS = {
    "red": (208, 40, 40),
    "green": (40, 150, 60),
    "blue": (50, 80, 210),
    "yellow": (225, 190, 30),
    "purple": (140, 60, 170),
    "black": (40, 40, 40),
}
GOODS = ("tea", "jam", "oil", "map", "pen", "hat", "cup", "nut")
DEAREST = 30

# Five columns and seven rows each, a row per number, its highest bit on the left.
GLYPHS = {
    "0": (14, 17, 19, 21, 25, 17, 14), "1": (4, 12, 4, 4, 4, 4, 14), "2": (14, 17, 1, 2, 4, 8, 31),
    "3": (31, 2, 4, 2, 1, 17, 14), "4": (2, 6, 10, 18, 31, 2, 2), "5": (31, 16, 30, 1, 1, 17, 14),
    "6": (6, 8, 16, 30, 17, 17, 14), "7": (31, 1, 2, 4, 8, 8, 8), "8": (14, 17, 17, 14, 17, 17, 14),
    "9": (14, 17, 17, 15, 1, 2, 12), "A": (14, 17, 17, 31, 17, 17, 17), "C": (14, 17, 16, 16, 16, 17, 14),
    "E": (31, 16, 16, 30, 16, 16, 31), "H": (17, 17, 17, 31, 17, 17, 17), "I": (14, 4, 4, 4, 4, 4, 14),
    "J": (7, 2, 2, 2, 2, 18, 12), "L": (16, 16, 16, 16, 16, 16, 31), "M": (17, 27, 21, 21, 17, 17, 17),
    "N": (17, 25, 21, 19, 17, 17, 17), "O": (14, 17, 17, 17, 17, 17, 14), "P": (30, 17, 17, 30, 16, 16, 16),
    "S": (15, 16, 16, 14, 1, 1, 30), "T": (31, 4, 4, 4, 4, 4, 4), "U": (17, 17, 17, 17, 17, 17, 14),
}  # fmt: skip
WIDTH = 5


@dataclass(frozen=True)
class Dial:
    """A dial's hand."""

    value: int


@dataclass(frozen=True)
class Bars:
    """The bars of a chart from left to right: colours and heights."""

    heights: tuple[tuple[str, int], ...]
    first: int = 0
    """The column of the first bar."""


@dataclass(frozen=True)
class Receipt:
    """The lines of a receipt from top to bottom; the last line is the total."""

    prices: tuple[tuple[str, int], ...]
    first: int = 0
    """The row of the first line."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(price for _, price in self.prices)


Picture: TypeAlias = Dial | Bars | Receipt


def any_dial(rng: random.Random) -> Dial:
    """Return a dial."""
    return Dial(rng.randrange(0, TOP + 1, STEP))


def any_bars(rng: random.Random) -> Bars:
    """Return three or four bars of different colours; one of them is the highest."""
    while True:
        colours = rng.sample(list(COLOURS), rng.choice((3, 4)))
        heights = [rng.randint(1, HIGHEST) for _ in colours]
        if heights.count(max(heights)) == 1:
            return Bars(tuple(zip(colours, heights, strict=True)), rng.randint(0, 1))


def any_receipt(rng: random.Random) -> Receipt:
    """Return a receipt of two or three different goods."""
    goods = rng.sample(GOODS, rng.choice((2, 3)))
    return Receipt(tuple((name, rng.randint(1, DEAREST)) for name in goods), rng.randint(0, 1))


def draw(picture: Picture, rng: random.Random) -> Image.Image:
    """Return the image, 48 x 48 RGB. Shades, sizes and positions vary with `rng`, the content does not."""
    shade = rng.randint(228, 255)
    if isinstance(picture, Receipt):
        return _receipt(picture, rng, shade)
    canvas = Image.new("RGB", (SIZE * FINER, SIZE * FINER), (shade, shade, rng.randint(shade - 8, shade)))
    pen = ImageDraw.Draw(canvas)
    if isinstance(picture, Dial):
        _dial(picture, rng, pen)
    else:
        _bars(picture, rng, pen)
    return canvas.reduce(FINER)


def png(image: Image.Image) -> bytes:
    """Return the image as the content of a file."""
    held = io.BytesIO()
    image.save(held, "PNG", optimize=True)
    return held.getvalue()


def _dial(dial: Dial, rng: random.Random, pen: ImageDraw.ImageDraw) -> None:
    """Draw a circle with a tick for every ten and the hand; the scale runs clockwise over three quarters."""
    middle = [FINER * (SIZE / 2 + rng.uniform(-1, 1)) for _ in range(2)]
    radius, ink = FINER * rng.uniform(19, 22), (rng.randint(0, 70),) * 3

    def point(value: float, share: float) -> tuple[float, float]:
        angle = math.radians(225 - 270 * value / TOP)
        return (middle[0] + share * radius * math.cos(angle), middle[1] - share * radius * math.sin(angle))

    box = (middle[0] - radius, middle[1] - radius, middle[0] + radius, middle[1] + radius)
    pen.ellipse(box, fill=(252, 252, 252), outline=ink, width=FINER)
    for tick in range(0, TOP + 1, STEP):
        pen.line([point(tick, 0.85), point(tick, 1.0)], fill=ink, width=FINER)
    colour = rng.choice(((200, 30, 30), (30, 30, 200), ink))
    pen.line([point(dial.value, -0.1), point(dial.value, 0.8)], fill=colour, width=2 * FINER)


def _bars(bars: Bars, rng: random.Random, pen: ImageDraw.ImageDraw) -> None:
    """Draw the bars on a line, with a faint one for every unit of height, which is half a cell."""
    unit, ground = FINER * CELL // 2, FINER * (SIZE - CELL // 2)
    for height in range(1, HIGHEST + 1):
        pen.line([(0, ground - height * unit), (SIZE * FINER, ground - height * unit)], fill=(205, 205, 205))
    width, place = FINER * rng.randint(5, 7), FINER * CELL * bars.first
    for colour, height in bars.heights:
        pen.rectangle((place, ground - height * unit, place + width - 1, ground), fill=COLOURS[colour])
        place += FINER * CELL
    pen.line([(0, ground), (SIZE * FINER, ground)], fill=(60, 60, 60), width=FINER)


def _receipt(receipt: Receipt, rng: random.Random, shade: int) -> Image.Image:
    """Write a line for each of the goods and, below a line, the sum."""
    image = Image.new("RGB", (SIZE, SIZE), (shade, shade, shade))
    ink, left, row = (rng.randint(0, 70),) * 3, rng.randint(0, 2), CELL * receipt.first
    for name, price in receipt.prices:
        _write(image, f"{name.upper()} {price:2d}", left, row, ink)
        row += CELL
    ImageDraw.Draw(image).line([(left, row + CELL // 2), (SIZE - 3 + left, row + CELL // 2)], fill=ink)
    _write(image, f"SUM {receipt.total:2d}", left, row + CELL, ink)
    return image


def _write(image: Image.Image, text: str, left: int, top: int, ink: tuple[int, ...]) -> None:
    for place, letter in enumerate(text):
        for row, bits in enumerate(GLYPHS.get(letter, ())):
            for column in range(WIDTH):
                if bits >> (WIDTH - 1 - column) & 1:
                    image.putpixel((left + place * CELL + column, top + row), ink)
