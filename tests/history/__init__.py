"""The history checker: random histories of a real engine, every token of which must be explained by one version.

actions       what can happen, as plain data that prints compactly and can be played again
transports    the transports of `tests.faults`, in each of their forms by turns
driver        a real scheduler turned step by step, its weight I/O under script
expected      what each weight verb must answer, and which version is in force
reference     one sequence in float64, each token's keys and values under the version that wrote them
checker       every returned number against the reference
machine       plays a history

Its engines, faults and wrong engines come from `tests.faults`.
"""
