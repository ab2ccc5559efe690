"""The sample that sees: small drawn pictures, what is asked about them, and the model that starts out reading them."""
