"""Low-rank adapters: adding them to a model, their initial values, and the computation of their layers."""
