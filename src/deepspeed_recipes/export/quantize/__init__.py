"""Models of fewer bits, and the proof that they still answer as trained."""
