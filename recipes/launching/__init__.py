"""Runs on more than this process: other hosts over ssh, SLURM, Kubernetes, and what happens when a part of one dies."""
