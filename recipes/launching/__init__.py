"""How a run is started and kept going: processes, restarts, other hosts over ssh, SLURM, Kubernetes."""
