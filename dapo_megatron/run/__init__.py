"""One run: this rank and its run folder (context, folder), the libraries it imports (libraries),
train and evaluate (session), from the config to the loop's objects (build), and what rank 0 records
(record)."""
