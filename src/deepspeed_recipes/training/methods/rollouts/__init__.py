"""Answers that the model writes while it trains: sampling them, scoring them, and what the loss makes of the scores."""
