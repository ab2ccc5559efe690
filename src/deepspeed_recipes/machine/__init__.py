"""Whether this machine is ready for a run: the checks of `ds-recipes doctor`, DeepSpeed's ops, free space."""
