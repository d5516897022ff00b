"""Verifiers, reward chains and the pool of killable processes they run in."""
