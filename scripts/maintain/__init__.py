"""Programs for maintainers: calibration, documents, sample data and models. Not in the wheel."""
