"""Rollouts: tickets and their ledger, the coordinator that decides what is issued, trained on and
carried, engines and graders behind a driver, evaluation, replay. Every rank decides alike."""
