"""Rollouts: tickets and their ledger, rounds of prompts until enough groups are mixed, evaluation.

Everything here runs on every rank alike; only grading and engine work differ between replicas.
"""
