"""Outputs of a run: metrics.jsonl and sample files in the run's folder, the console, MLflow.
Only rank 0 writes them. The recorder of every other rank does nothing."""
