"""The policy: a Megatron-core model, its update step, optimizer state and checkpoints.

Nothing here depends on the RL algorithm. The loss is passed in as a function of log-probs.
"""
