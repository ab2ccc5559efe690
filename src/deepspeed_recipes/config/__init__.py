"""Read, resolve and lint DeepSpeed JSON, without torch; DeepSpeed is imported only on request."""
