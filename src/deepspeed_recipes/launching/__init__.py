"""How a run is checked, started, watched and restarted: on this machine, over ssh, on SLURM and on Kubernetes."""
