"""Integrity of checkpoints: digests, fingerprints of the data and model, and safe loading."""
