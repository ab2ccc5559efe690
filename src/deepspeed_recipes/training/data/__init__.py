"""The data: read, converted, tokenized, packed and described."""
