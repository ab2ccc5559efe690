"""The model: loaded, and made leaner or faster."""
