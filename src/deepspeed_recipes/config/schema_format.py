"""The form of `schema.json`: where it is, the version of its form, and the sample values that it is learned from."""

from pathlib import Path

SHIPPED = Path(__file__).with_name("schema.json")
FORMAT = 4

# One value of each kind that JSON has, with falsy and truthy ones separate: DeepSpeed often tests only for emptiness.
SAMPLES = {
    "null": None,
    "false": False,
    "true": True,
    "zero": 0,
    "one": 1,
    "integer": 3,
    "zero point": 0.0,
    "fraction": 2.5,
    "empty text": "",
    "text": "x",
    "auto": "auto",
    "empty list": [],
    "list of text": ["x"],
    "list": [[1]],
    "empty object": {},
    "object": {"x": 1},
}
