"""What a run shows of itself: report.html, the same as text, comparisons, and the index of all runs."""
