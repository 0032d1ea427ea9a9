"""Scenarios that failed once, or that an attack tried."""
