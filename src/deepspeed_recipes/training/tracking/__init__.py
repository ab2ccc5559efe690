"""Reports a run to Weights & Biases, TensorBoard, MLflow and Trackio, in addition to its own files."""
