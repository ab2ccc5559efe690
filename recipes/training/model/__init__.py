"""The model: loaded, adapted, and made leaner or faster."""
