"""Low-rank adapters: how they are added to a model, how they start, and how their layers compute."""
