"""The test suite: one file per module, parity against plain PyTorch, and the documentation."""
