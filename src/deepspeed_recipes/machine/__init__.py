"""Checks that this machine is ready for a run: `ds-recipes doctor`'s checks, DeepSpeed's ops, free space."""
