"""Loggers, to which metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, CSV; each in a process."""
