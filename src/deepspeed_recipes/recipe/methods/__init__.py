"""Training methods, as far as planning, checking and launching depend on them; standard library only."""
