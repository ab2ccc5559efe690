"""Analyses the traces of a run's recorded steps and returns a verdict on where the time went; without torch."""
