"""Models beside each other on held-out examples: answers asked for, scores with intervals, paired tests."""
