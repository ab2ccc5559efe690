"""Compares models on held-out examples: answers, scores with intervals, paired tests."""
