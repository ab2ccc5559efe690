"""What only maintainers run: calibration, documents, the makers of the samples. Not in the wheel."""
