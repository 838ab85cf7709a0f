"""The formulas of DAPO: functions of tensors and plain numbers; no rank, config tree or backend.

Every file opens with how it differs from the paper (arXiv 2503.14476).
"""
