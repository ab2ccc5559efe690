"""The forms in which examples are written."""
