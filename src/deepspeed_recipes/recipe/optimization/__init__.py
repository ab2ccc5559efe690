"""Optimizers and adapters, and the settings with which each can be combined."""
