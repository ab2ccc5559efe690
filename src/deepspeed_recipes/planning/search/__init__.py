"""Searches layouts and configurations for a model and a cluster, and answers questions about the results."""
