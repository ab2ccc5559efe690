"""Reports a run to Weights & Biases, TensorBoard, MLflow and Trackio, in addition to its own files.

transformers' callbacks (`report_to`) do not suffice: after a restart they log the steps since the checkpoint a second
time, they prefix the names of metrics.jsonl with `train/`, and they send no alerts (transformers 5.22).
"""
