"""Starts a rank: its log, its connection to the others, and runs that are started without our launcher."""
