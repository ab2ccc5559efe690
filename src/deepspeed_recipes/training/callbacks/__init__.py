"""What happens around the steps: metrics, evaluations, checkpoints, guards."""
