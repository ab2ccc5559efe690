"""Predicts the time of an optimizer step."""
