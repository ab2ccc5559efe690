"""Runs as Kubernetes manifests."""
