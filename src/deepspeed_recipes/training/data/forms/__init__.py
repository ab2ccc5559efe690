"""The supported forms of examples."""
