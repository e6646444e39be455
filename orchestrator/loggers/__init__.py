"""Where metrics go beside the run's folder: TensorBoard, Weights & Biases, MLflow, CSV; a process for each."""
