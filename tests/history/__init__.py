"""The history checker: random histories of a real engine, every token of which must be explained by one version.

actions       the events of a history, as plain data that prints compactly and can be played again
transports    the transports of `tests.faults`, in each of their forms by turns
driver        a real scheduler turned step by step, its weight I/O under script
expected      the answer that each weight verb must give, and the version in force
reference     one sequence in float64, each token's keys and values under the version that wrote them
checker       compares every returned number with the reference
machine       plays a history

Its engines, faults and wrong engines come from `tests.faults`.
"""
