"""The policy: a Megatron-core model, its update step, optimizer state and checkpoints.

Nothing here knows the algorithm; the loss comes in as a function of log-probs.
"""
