"""GGUF: one file for llama.cpp and what is built on it, such as Ollama; written by llama.cpp's own converter."""
