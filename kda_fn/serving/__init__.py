"""Batches of requests, as plain data and pure functions: slots of states, plans, speculation, one step."""
