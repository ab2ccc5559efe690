"""Is this machine ready for a run: what `scripts/doctor.py` looks at."""
