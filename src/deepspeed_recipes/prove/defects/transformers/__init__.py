"""Defects that show in transformers, or between it and DeepSpeed."""
