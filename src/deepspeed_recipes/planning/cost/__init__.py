"""Predicts the memory and time that training takes."""
