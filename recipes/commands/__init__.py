"""The commands: what `dsr launch` and, in a checkout, scripts/launch.py run; a module each, with a `main`."""
