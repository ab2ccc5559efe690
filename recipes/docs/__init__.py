"""The generated parts of the documents; `python -m recipes.docs` writes them all."""
