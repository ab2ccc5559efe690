"""Read, resolve and lint DeepSpeed JSON: no torch, and DeepSpeed only where it is asked for."""
