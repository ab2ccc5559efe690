"""Writes smaller copies of models: quantised folders, and GGUF files for llama.cpp and programs based on it."""
