"""What a method of training is, as far as planning, checking and launching know it; standard library only."""
