"""The sections of a report, made from the content of a run folder."""
