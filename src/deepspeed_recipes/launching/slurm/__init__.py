"""Runs as SLURM batch jobs."""
