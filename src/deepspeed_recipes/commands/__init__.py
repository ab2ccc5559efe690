"""The commands: what `ds-recipes launch` runs, and scripts/launch.py in a checkout; a module each, with a `main`."""
