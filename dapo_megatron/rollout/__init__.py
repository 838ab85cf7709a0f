"""Rollouts: the coordinator and its ticket ledger, the pool of engine servers, evaluation, and
replay. The coordinator, on rank 0, decides which prompts are issued and which groups are trained on
or carried to the next step."""
