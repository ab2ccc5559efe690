"""Reports on runs: report.html, the same as text, comparisons of runs, and the index of all runs."""
