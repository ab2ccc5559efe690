"""Profiles of models: parameters, activations and arithmetic of their layers."""
