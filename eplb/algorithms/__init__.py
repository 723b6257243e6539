"""Planners: pure functions from loads of logical experts to what every slot holds.  Need numpy; know no engine."""

TARGET = 0.98
"""The balancedness beyond which sampling noise of a batch hides the rest."""
