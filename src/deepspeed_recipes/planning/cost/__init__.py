"""What training costs: memory and time."""
