"""Planners: pure functions from loads of logical experts to what every slot holds.  Need numpy; know no engine."""
