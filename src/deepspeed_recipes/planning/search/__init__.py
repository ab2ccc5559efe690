"""The search over ways to train, and what people and the launcher ask of it."""
