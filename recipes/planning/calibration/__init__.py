"""Published and own measurements, and the constants fitted to them."""
