"""The named benchmarks: what is compared, how one run is measured, and how the result is shown."""
