"""Generated blocks: parts of a document between two comments, written by code."""


def begin(name: str) -> str:
    """Return the line that opens a block."""
    return f"<!-- generated: {name} -->\n"


END = "<!-- /generated -->\n"


def with_block(document: str, name: str, generated: str) -> str:
    """Return the document with `generated` in its block `name`."""
    before, opening, rest = document.partition(begin(name))
    assert opening, f"the document has no block {name!r}"
    return before + opening + generated + END + rest.partition(END)[2]


def block(document: str, name: str) -> str:
    """Return the content of a document's block `name`."""
    return document.partition(begin(name))[2].partition(END)[0]
