"""Models that see: pictures in conversations, the processor, the tower, and ranks whose batch has no picture."""
