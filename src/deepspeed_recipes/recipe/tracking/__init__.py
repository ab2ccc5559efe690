"""The trackers that a run can report to, and what is particular to Weights & Biases."""
