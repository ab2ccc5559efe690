"""What a run reports beside its own files: to Weights & Biases, TensorBoard, MLflow and Trackio."""
