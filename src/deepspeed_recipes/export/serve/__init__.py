"""After training: smaller models, and servers that answer with them."""
