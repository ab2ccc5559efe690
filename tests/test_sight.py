"""The sample that sees: drawings, questions and the model that starts out reading them."""

import io
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from deepspeed_recipes.recipe.project import SAMPLES
from deepspeed_recipes.recipe.samples import TINY_VISION
from scripts.maintain.samples.sight import ask, draw, labels, make_data

READING = SAMPLES / "sight" / "reading"


def rows(name):
    return pq.read_table(READING / f"{name}.parquet").to_pylist()


def test_counts_and_shares_are_the_documented_ones():
    train, held_out = rows("train"), rows("held_out")
    assert (len(train), len(held_out)) == (make_data.TRAIN, make_data.HELD_OUT) == (3000, 300)
    shown = [len(row["images"]) for row in train]
    assert shown.count(0) / 3000 == pytest.approx(1 / 24, rel=0.3)
    assert shown.count(2) / 3000 == pytest.approx(1 / 12, rel=0.3)
    for row in (*train, *held_out):
        question, answer = row["messages"]
        assert question["content"].count("<image>") == len(row["images"]) and answer["content"].strip()


def test_no_held_out_picture_is_trained_on():
    seen = {one["bytes"] for row in rows("train") for one in row["images"]}
    assert not seen & {one["bytes"] for row in rows("held_out") for one in row["images"]}


def test_regeneration_gives_the_same_words_and_pixels():
    committed, made = rows("held_out"), make_data.rows(40, 2026, "held_out")
    for old, new in zip(committed, made, strict=False):
        assert old["messages"] == new["messages"]
        for one, other in zip(old["images"], new["images"], strict=True):
            assert np.array_equal(pixels(one["bytes"]), pixels(other["bytes"]))
    assert make_data.rows(5, 7, "held_out") != made[:5]


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def test_a_drawing_shows_what_it_is_of():
    """Bars have their colour as high as they are, and a hand points where its value is."""
    rng = random.Random(0)
    for _ in range(20):
        bars = ask.any_bars(rng)
        image = np.asarray(draw.draw(bars, rng)).astype(int)
        for column, (colour, height) in enumerate(bars.heights, start=bars.first):
            at = image[:, column * draw.CELL + 2]
            high = (np.abs(at - draw.COLOURS[colour]).sum(-1) < 30).sum()
            assert abs(high - height * draw.CELL / 2) <= 2
    for _ in range(20):
        low, high = (draw.draw(draw.Dial(value), random.Random(1)) for value in (0, 100))
        assert low != high


def test_labels_name_what_is_at_a_place():
    letters, names, numbers = labels.of(draw.Receipt((("tea", 6), ("oil", 28)), 1))
    assert [list(draw.GLYPHS)[one - 1] if one else " " for one in letters[6:12]] == list("TEA  6")
    assert names[12] == 1 + labels.NAMES.index("oil") and numbers[6:12] == [6] * 6
    assert numbers[-6:] == [0] * 6 and numbers[24:30] == [34] * 6
    for rng in map(random.Random, range(50)):
        for kind, found in zip(labels.CLASSES, labels.of(ask.any_picture(rng)), strict=True):
            assert len(found) == labels.SIDE**2 and min(found) >= 0 and max(found) < kind


def test_the_model_is_small_and_loads_in_plain_transformers():
    folder = SAMPLES / "sight" / "model"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**21
    model = AutoModelForImageTextToText.from_pretrained(TINY_VISION)
    assert model.num_parameters() == 491_088
    assert AutoProcessor.from_pretrained(TINY_VISION).image_token == "<|image|>"
