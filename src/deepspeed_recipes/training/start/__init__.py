"""The first moments of a rank: its log, its place among the others, and a run that no launcher of ours watches."""
