"""Shared by the methods on preferences: pairs, log-likelihoods in tiles, and the reference model."""
