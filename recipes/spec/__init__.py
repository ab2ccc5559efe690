"""The vocabulary of a recipe, standard library only: importing it costs milliseconds and needs no torch."""
