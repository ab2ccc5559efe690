"""The GPUs, nodes and clusters that people have."""
