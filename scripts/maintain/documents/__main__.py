"""Writes the generated parts of all documents: `make docs`, or `python -m scripts.maintain.documents`."""

from .documents import write

for path in write():
    print(f"written: {path}")
