"""Whether this machine is ready for a run: the checks of `scripts/doctor.py`, DeepSpeed's ops, free space."""
