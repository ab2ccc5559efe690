"""How weights are trained where a recipe asks for more: optimizers, learning rates, PiSSA's start, and noise."""
