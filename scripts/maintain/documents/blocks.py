"""Generated blocks: parts of a document between two comments, written by code."""


def begin(name: str) -> str:
    """Return the line that opens a block."""
    return f"<!-- generated: {name} -->\n"


END = "<!-- /generated -->\n"


def block(document: str, name: str) -> str:
    """Return the content of a document's block `name`."""
    return document.partition(begin(name))[2].partition(END)[0]
