"""Proves that this stack trains correctly: techniques compared with a plain loop, and known defects of libraries."""
