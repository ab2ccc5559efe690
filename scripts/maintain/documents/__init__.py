"""Generates parts of the documents; `python -m scripts.maintain.documents` writes them all."""
