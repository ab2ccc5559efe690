"""What a run does. `run.py` composes the other modules and reads from top to bottom like a cookbook page."""
