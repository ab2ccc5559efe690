"""The commands, run as `ds-recipes launch` or, in a checkout, scripts/launch.py: one module each, with a `main`."""
