"""Reads, converts, tokenizes, packs and describes the data."""
