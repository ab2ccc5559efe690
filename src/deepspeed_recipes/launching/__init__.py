"""Checks, starts, watches and restarts runs: on this machine, over ssh, on SLURM, Kubernetes, Ray and in clouds."""
