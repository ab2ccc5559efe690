"""Runs on a Ray cluster."""
