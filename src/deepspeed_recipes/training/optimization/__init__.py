"""Optional features of the optimizer: other optimizers, learning rates per weight, and noise."""
