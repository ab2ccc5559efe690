"""Derives the linter's schemas of DeepSpeed's keys and values and of transformers' model types."""
