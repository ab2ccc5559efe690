"""What happens beside the steps: numbers, evaluations, checkpoints, guards."""
