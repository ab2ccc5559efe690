"""Loads the model and applies memory and speed optimizations."""
