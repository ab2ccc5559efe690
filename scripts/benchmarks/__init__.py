"""The named benchmarks of `scripts/benchmark.py`: what is compared, how one run is measured, and how it is told."""
