"""Callbacks of the Trainer: metrics, evaluations, checkpoints, guards."""
