"""GGUF export: one file for llama.cpp and programs based on it, such as Ollama; written by llama.cpp's converter."""
