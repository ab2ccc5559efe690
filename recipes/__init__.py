"""Fine-tuning recipes: every module here is the page of one model family."""
