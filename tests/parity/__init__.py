"""Every technique trains the same model as plain PyTorch."""
