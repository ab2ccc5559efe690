"""Predicts the memory that training takes on GPUs, hosts, NVMe drives and disks."""
