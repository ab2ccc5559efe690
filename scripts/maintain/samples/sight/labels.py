"""Labels for each cell of an image's grid of 8 pixels, on which the vision tower is pre-trained alone."""

from .draw import CELL, COLOURS, DEAREST, GLYPHS, GOODS, HIGHEST, SIZE, STEP, TOP, Bars, Dial, Picture, Receipt

SIDE = SIZE // CELL
NAMES = (*COLOURS, *GOODS, "sum")
CLASSES = [2 + len(GLYPHS), 1 + len(NAMES), 3 * DEAREST + 1 + TOP + 1]
"""Numbers of classes of the three labels: the letter (0 for none), the meaning of the column or row, and its number or
the dial's."""
NOTHING = 0


def of(picture: Picture) -> list[list[int]]:
    """Return three labels for each cell, row by row; 0 stands for nothing."""
    letters, names = [NOTHING] * SIDE**2, [NOTHING] * SIDE**2
    if isinstance(picture, Dial):
        return [letters, names, [3 * DEAREST + 1 + picture.value // STEP] * SIDE**2]
    if isinstance(picture, Bars):
        return [letters, *_of_bars(picture)]
    return list(_of_receipt(picture))


def _of_bars(bars: Bars) -> tuple[list[int], list[int]]:
    """Return the colour and the height of the bar in each column, wherever the columns begin."""
    names, numbers = [NOTHING] * SIDE**2, [NOTHING] * SIDE**2
    for column, (colour, height) in enumerate(bars.heights, start=bars.first):
        for row in range(SIDE):
            names[row * SIDE + column] = 1 + NAMES.index(colour)
            numbers[row * SIDE + column] = height
    assert max(numbers) <= HIGHEST
    return names, numbers


def _of_receipt(receipt: Receipt) -> tuple[list[int], list[int], list[int]]:
    """Return the letter in each cell, and the name and the price of its row."""
    letters, names, numbers = ([NOTHING] * SIDE**2 for _ in range(3))
    rows = [*receipt.prices, ("sum", receipt.total)]
    places = [receipt.first + number for number in range(len(receipt.prices))]
    for row, (name, price) in zip([*places, places[-1] + 2], rows, strict=True):
        for column, letter in enumerate(f"{name.upper()} {price:2d}"):
            at = row * SIDE + column
            letters[at] = 1 + list(GLYPHS).index(letter) if letter in GLYPHS else NOTHING
            names[at], numbers[at] = 1 + NAMES.index(name), price
    return letters, names, numbers
