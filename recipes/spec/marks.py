"""Generated parts of a document that people write."""


def between(document: str, begin: str, end: str, generated: str) -> str:
    """Return the document with `generated` in the place between its two marks."""
    before, _, rest = document.partition(begin)
    return before + begin + generated + end + rest.partition(end)[2]
