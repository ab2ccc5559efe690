"""Lints accelerate's YAML: keys that accelerate rejects or ignores, and settings that contradict each other."""
