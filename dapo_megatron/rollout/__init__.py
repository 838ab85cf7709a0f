"""Rollouts: the coordinator and its ticket ledger, the driver of engines and graders, evaluation,
and replay. The coordinator decides which prompts are issued and which groups are trained on or
carried to the next step. Every rank makes the same decisions."""
