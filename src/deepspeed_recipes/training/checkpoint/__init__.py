"""What a checkpoint holds and whether it may be loaded."""
