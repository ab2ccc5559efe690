"""Where the time of a run's recorded steps went: traces in, a verdict out; nothing here needs torch."""
