"""Where the metrics and files of a run go: JSONL in the run's folder, MLflow, the console.
Rank 0 has a composite of them; the other ranks track nothing."""
