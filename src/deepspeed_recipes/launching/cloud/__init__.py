"""Runs on cloud machines that are rented for one job: Amazon SageMaker and SkyPilot."""
