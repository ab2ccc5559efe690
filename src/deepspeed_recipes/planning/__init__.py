"""What a run costs: memory and time, computed before a GPU is rented."""
