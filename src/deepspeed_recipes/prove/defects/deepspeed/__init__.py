"""Defects that show in DeepSpeed alone."""
