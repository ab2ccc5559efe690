"""How weights are trained where a recipe asks for more: optimizers, learning rates, and noise."""
