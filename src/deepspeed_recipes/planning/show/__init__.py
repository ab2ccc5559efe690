"""Plans as a table, as JSON and as a figure."""
