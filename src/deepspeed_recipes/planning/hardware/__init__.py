"""GPUs, instances and clusters, with their specifications and prices."""
