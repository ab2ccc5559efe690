"""Vision-language models: images in conversations, the processor, the vision tower, and batches without images."""
