"""How long an optimizer step takes."""
