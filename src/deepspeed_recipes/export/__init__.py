"""After training: merge, quantise, convert, evaluate, serve and publish a model."""
