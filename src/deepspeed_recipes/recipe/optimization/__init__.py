"""What updates the weights, and which of them: optimizers, adapters, and what each can be combined with."""
