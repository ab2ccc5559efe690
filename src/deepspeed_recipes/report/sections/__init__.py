"""The sections of a report, each from what the run folder holds."""
