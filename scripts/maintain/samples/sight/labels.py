"""Labels for each cell of an image's grid of 8 pixels, on which the vision tower is pre-trained alone."""

from .draw import CELL, COLOURS, DEAREST, GLYPHS, GOODS, HIGHEST, SIZE, STEP, TOP, Bars, Dial, Picture

SIDE = SIZE // CELL
NAMES = (*COLOURS, *GOODS, "sum")
CLASSES = [2 + len(GLYPHS), 1 + len(NAMES), 3 * DEAREST + 1 + TOP + 1]
"""Numbers of classes of the three labels: the letter (0 for none), the meaning of the column or row, and its number or
the dial's."""
NOTHING = 0


def of(picture: Picture) -> list[list[int]]:
    """Return three labels for each cell, row by row; 0 stands for nothing."""
    letters, names, numbers = ([NOTHING] * SIDE**2 for _ in range(3))
    if isinstance(picture, Dial):
        numbers = [3 * DEAREST + 1 + picture.value // STEP] * SIDE**2
    elif isinstance(picture, Bars):  # the colour and the height of the bar in each column, wherever the columns begin
        for column, (colour, height) in enumerate(picture.heights, start=picture.first):
            for row in range(SIDE):
                names[row * SIDE + column] = 1 + NAMES.index(colour)
                numbers[row * SIDE + column] = height
        assert max(numbers) <= HIGHEST
    else:  # the letter in each cell, and the name and the price of its row
        rows = [*picture.prices, ("sum", picture.total)]
        places = [picture.first + number for number in range(len(picture.prices))]
        for row, (name, price) in zip([*places, places[-1] + 2], rows, strict=True):
            for column, letter in enumerate(f"{name.upper()} {price:2d}"):
                at = row * SIDE + column
                letters[at] = 1 + list(GLYPHS).index(letter) if letter in GLYPHS else NOTHING
                names[at], numbers[at] = 1 + NAMES.index(name), price
    return [letters, names, numbers]
