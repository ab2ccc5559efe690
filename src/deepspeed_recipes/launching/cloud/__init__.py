"""Runs on machines that a cloud rents for one job: Amazon SageMaker and SkyPilot."""
