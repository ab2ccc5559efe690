"""Predicts the memory and time of a run before a GPU is rented, and searches for the configuration that fits."""
