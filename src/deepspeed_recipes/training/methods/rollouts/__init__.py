"""Answers that the model writes during training: their sampling, their scores, and the losses on these."""
