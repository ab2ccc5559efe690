"""What planning knows of a model: its layers' parameters, activations and arithmetic."""
