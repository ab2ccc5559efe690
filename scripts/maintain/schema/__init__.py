"""Derives what the linter knows of DeepSpeed's keys and values and of transformers' model types."""
