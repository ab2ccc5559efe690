"""The trackers to which a run can report, and the settings of Weights & Biases."""
